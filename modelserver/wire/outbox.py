"""One write per connection and turn of the event loop."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Flushable(Protocol):
    """A connection with something to send."""

    __slots__ = ()

    def flush(self) -> None:
        """Send the collected data in one write. Does not raise."""


class Outbox:
    """Connections with data to send, flushed at the end of this turn of the loop.

    A connection that answers while it reads flushes itself when it has read all; one that is answered from
    elsewhere (a batch, a timer) calls `add`. Many answers of one turn then leave in one write.
    """

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Flushable] = []

    def add(self, connection: Flushable) -> None:
        """Have `connection` flush soon. The caller must add it only once."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(connection)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.flush()
