"""What waits to be sent on one stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from modelserver.core.tensor import Buffer
from modelserver.wire.http2.frame import DATA, END_STREAM, pack_head


class Outgoing:
    """What waits to be sent on one stream: parts of a body, by reference, and the block that ends the stream.

    `ending` is None while more may follow, and b"" where the last DATA frame ends the stream. `room` is the
    future of a handler that waits for the queue to become short.
    """

    __slots__ = ("ending", "is_ready", "num_bytes", "offset", "parts", "room", "stuck_since_s")

    def __init__(self) -> None:
        self.parts: deque[Buffer] = deque()
        # How much of the first part was already sent.
        self.offset = 0
        self.num_bytes = 0
        self.ending: bytes | None = None
        # Whether the stream is in the sender's queue; a stream whose window is used up is not.
        self.is_ready = False
        self.room: asyncio.Future[None] | None = None
        # Since the sweep first saw that nothing moves.
        self.stuck_since_s: float | None = None

    def add(self, parts: Sequence[Buffer]) -> int:
        """More of the body; returns its size."""
        before = self.num_bytes
        for part in parts:
            if part:
                self.parts.append(part)
                self.num_bytes += len(part)
        return self.num_bytes - before

    def frame(self, frames: list[Buffer], stream_id: int, size: int, max_frame: int) -> None:
        """Append DATA frames for the next `size` bytes to `frames`; nothing is copied."""
        self.num_bytes -= size
        self.stuck_since_s = None
        ends_stream = not self.num_bytes and self.ending == b""
        # Full frames of a run share one head.
        full_head = pack_head(max_frame >> 8, max_frame & 0xFF, DATA, 0, stream_id)
        while size > 0:
            length = min(size, max_frame)
            size -= length
            is_last = ends_stream and not size
            if length == max_frame and not is_last:
                frames.append(full_head)
            else:
                flags = END_STREAM if is_last else 0
                frames.append(pack_head(length >> 8, length & 0xFF, DATA, flags, stream_id))
            self._slice(frames, length)

    def wake(self) -> None:
        """There is room again, or nothing more will be sent."""
        room, self.room = self.room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _slice(self, frames: list[Buffer], length: int) -> None:
        parts = self.parts
        while length:
            part, offset = parts[0], self.offset
            available = len(part) - offset
            if available <= length:
                frames.append(memoryview(part)[offset:] if offset else part)
                parts.popleft()
                self.offset = 0
                length -= available
            else:
                frames.append(memoryview(part)[offset : offset + length])
                self.offset = offset + length
                length = 0
