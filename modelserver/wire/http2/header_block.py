"""Header blocks out of HEADERS and CONTINUATION frames (RFC 9113, 6.2 and 6.10)."""

from __future__ import annotations

from typing import Final

from modelserver.telemetry.wire import Violation
from modelserver.wire.http2.control import check_dependency
from modelserver.wire.http2.frame import (
    CONTINUATION,
    HAS_PRIORITY,
    PADDED,
    ConnectionFault,
    ErrorCode,
    protocol_fault,
    too_much,
)
from modelserver.wire.limits import HeadLimits

_PRIORITY_BYTES: Final = 5


class OpenBlock:
    """A block that its HEADERS frame did not complete: only CONTINUATION frames may follow."""

    __slots__ = ("_num_frames", "content", "flags", "stream_id")

    def __init__(self, stream_id: int, flags: int, content: bytes) -> None:
        self.stream_id = stream_id
        # The flags of the HEADERS frame.
        self.flags = flags
        self.content = content
        self._num_frames = 0

    def check(self, kind: int, stream_id: int, length: int, limits: HeadLimits) -> None:
        """The head of the next frame has arrived. Raises ConnectionFault if it is not the block's, or too large."""
        if kind != CONTINUATION or stream_id != self.stream_id:
            raise protocol_fault(f"the header block of stream {self.stream_id} must go on in CONTINUATION frames")
        if self._num_frames >= limits.max_continuations or len(self.content) + length > limits.max_header_block_bytes:
            raise too_much(Violation.TOO_MANY_CONTINUATIONS)

    def add(self, part: memoryview) -> None:
        """The content of the next frame."""
        self._num_frames += 1
        self.content += part


def part_of_block(payload: memoryview, flags: int, stream_id: int) -> bytes:
    """The part of the block in a HEADERS frame, without padding and priority. Raises ConnectionFault."""
    num_padding = 0
    if flags & PADDED:
        if not payload:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"HEADERS on stream {stream_id} is cut off")
        num_padding, payload = payload[0], payload[1:]
    if num_padding > len(payload):
        raise protocol_fault(f"HEADERS on stream {stream_id} has more padding than bytes")
    content = payload[: len(payload) - num_padding]
    if flags & HAS_PRIORITY:
        if len(content) < _PRIORITY_BYTES:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"HEADERS on stream {stream_id} is cut off")
        check_dependency(stream_id, content)
        content = content[_PRIORITY_BYTES:]
    return content.tobytes()
