"""Back-pressure of one direction of a streamed call: when a number of pieces are on their way, the sender waits."""

from __future__ import annotations

import asyncio
from typing import Final

# One piece is a message or a chunk; a reader that keeps up never lets its writer wait.
WINDOW_PIECES: Final = 16


class Window:
    """What a sender may still send. Event loop thread only, one sender."""

    def __init__(self) -> None:
        self._room = WINDOW_PIECES
        self._waiter: asyncio.Future[None] | None = None
        # The reader has left.
        self.is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether a piece could be sent now."""
        return self._room > 0

    def try_take(self) -> bool:
        """Take room for one piece, if there is some. Raises ConnectionResetError when the reader has left."""
        if self.is_closed:
            raise ConnectionResetError("the reader has left")
        if self._room == 0:
            return False
        self._room -= 1
        return True

    async def wait(self) -> None:
        """Return when there is room for a piece. Raises ConnectionResetError when there will be none."""
        while self._room == 0 and not self.is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self.is_closed:
            raise ConnectionResetError("the reader has left")

    async def take(self) -> None:
        """Room for one piece; waits for it. Raises ConnectionResetError when there will be none."""
        await self.wait()
        self._room -= 1

    def grant(self, num_pieces: int) -> None:
        """The reader has taken this many pieces."""
        self._room += num_pieces
        self._wake()

    def close(self) -> None:
        """Nobody reads any more."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
