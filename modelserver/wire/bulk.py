"""Turns for connections with much to send, so that a thousand of them do not delay those with little."""

from __future__ import annotations

import asyncio
from collections import deque

# Bytes that a connection may be sent before it waits for its next turn.
TURN_BYTES = 64 * 1024
# Connections served in one turn of the loop: about a millisecond of making, copying and sending.
MAX_TURNS_AT_ONCE = 16


class BulkTurns:
    """Resumes waiting connections, a few in each turn of the loop, in the order of their arrival. Loop thread only."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return when it is the caller's turn, in the loop's next turn at the earliest."""
        turn: asyncio.Future[None] = self._loop.create_future()
        if not self._waiting:
            self._loop.call_soon(self._give)
        self._waiting.append(turn)
        await turn

    def _give(self) -> None:
        num_left = MAX_TURNS_AT_ONCE
        while num_left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                num_left -= 1
        if self._waiting:
            self._loop.call_soon(self._give)
