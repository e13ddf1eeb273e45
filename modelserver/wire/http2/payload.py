"""The content of DATA frames, which is read as it comes (RFC 9113, 6.1)."""

from __future__ import annotations

from typing import Final

from modelserver.wire.body import MAX_RECEIVED_BYTES
from modelserver.wire.http2.frame import (
    END_STREAM,
    PADDED,
    ConnectionFault,
    ErrorCode,
    protocol_fault,
    window_update,
)
from modelserver.wire.http2.stream import Http2Stream

# With at least this much of a frame still to come, it is received straight into the message's memory.
_MIN_DIRECT_BYTES: Final = 32 * 1024
# DATA frames below this size that end no stream are wasteful; empty ones more so. This much in larger frames pays for a
# small one: HAProxy cuts the data that it forwards into frames of 16320 and 64 bytes in turn.
_TINY_BYTES: Final = 256
_PAYING_BYTES: Final = 4096
_MAX_PAID_BYTES: Final = 1 << 20
_EMPTY_GLITCHES: Final = 10


class Payload:
    """The payload that is being read: `begin`, then `read` until `is_complete`.

    `stream` is None for data to drop: DATA of a stream that was reset, frames without meaning.
    """

    __slots__ = ("_ends_stream", "_num_bytes", "_num_left", "_num_padding", "_paid_bytes", "stream")

    def __init__(self) -> None:
        self.stream: Http2Stream | None = None
        # Bytes of the frame without its padding, which does not count.
        self._num_bytes = 0
        self._num_left = 0
        self._num_padding = 0
        self._ends_stream = False
        # In larger frames, and not yet used up by tiny ones.
        self._paid_bytes = 0

    @property
    def is_complete(self) -> bool:
        return not self._num_left and not self._num_padding

    def begin(self, stream: Http2Stream | None, stream_id: int, flags: int, length: int, padding: int) -> int:
        """The head of a DATA frame has arrived, and, if it is padded, its first byte, `padding`.

        Returns how many bytes were read after the head. Raises ConnectionFault for a frame that is not allowed.
        """
        num_before = 1 if flags & PADDED else 0
        if num_before + padding > length:
            raise protocol_fault(f"DATA on stream {stream_id} has more padding than bytes")
        self.stream = stream
        self._num_bytes = self._num_left = length - num_before - padding
        self._num_padding = padding
        self._ends_stream = bool(flags & END_STREAM)
        if stream is not None:
            _count(stream, length, self._num_left)
        return num_before

    def skip(self, length: int) -> None:
        """A frame without meaning is too large to wait for."""
        self.stream = None
        self._num_bytes = self._num_left = length
        self._num_padding = 0
        self._ends_stream = False

    def read(self, view: memoryview, position: int, end: int) -> int:
        """Take the received part; returns the position after it."""
        stream = self.stream
        num_bytes = min(self._num_left, end - position)
        if num_bytes:
            self._num_left -= num_bytes
            if stream is not None and stream.is_open:
                stream.receive(view[position : position + num_bytes])
            position += num_bytes
        num_bytes = min(self._num_padding, end - position) if not self._num_left else 0
        self._num_padding -= num_bytes
        return position + num_bytes

    def room(self) -> memoryview | None:
        """Memory of the message into which the next bytes may be received directly."""
        stream = self.stream
        if stream is None or self._num_left < _MIN_DIRECT_BYTES or not stream.is_open:
            return None
        room = stream.room()
        if room is None or len(room) < _MIN_DIRECT_BYTES:
            return None
        return room[: min(self._num_left, MAX_RECEIVED_BYTES)]

    def filled(self, num_bytes: int) -> None:
        """This many bytes were received into `room`."""
        assert self.stream is not None, "a stream gave the room"
        self._num_left -= num_bytes
        self.stream.filled(num_bytes)

    def finish(self) -> tuple[Http2Stream | None, int]:
        """It is complete. Returns the stream that it ended, if any, and the number of glitches that it counts as."""
        stream, self.stream = self.stream, None
        if self._ends_stream:
            return (stream if stream is not None and stream.is_open else None), 0
        if self._num_bytes >= _TINY_BYTES:
            self._paid_bytes = min(self._paid_bytes + self._num_bytes, _MAX_PAID_BYTES)
            return None, 0
        if stream is not None and not stream.is_within_message:
            return None, 0
        if self._num_bytes and self._paid_bytes >= _PAYING_BYTES:
            self._paid_bytes -= _PAYING_BYTES
            return None, 0
        return None, 1 if self._num_bytes else _EMPTY_GLITCHES

    def num_missing(self, stream: Http2Stream) -> int:
        """Bytes of the stream in the begun frame that have not arrived."""
        return self._num_left if stream is self.stream else 0


def _count(stream: Http2Stream, length: int, num_bytes: int) -> None:
    """Check a DATA frame of `length`, `num_bytes` without padding, against the rules of its stream."""
    if stream.is_ended:
        raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"DATA after the end of stream {stream.id}")
    stream.receive_window -= length
    # Until it knows our settings, the client uses the default window, which may be larger.
    if stream.receive_window < 0 and length and not stream.connection.num_unacknowledged:
        raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"DATA on stream {stream.id} is over its window")
    stream.num_received += num_bytes
    stream.check_length(is_complete=False)
    if length > num_bytes:
        # No reader consumes padding.
        stream.receive_window += length - num_bytes
        stream.connection.sender.frames.append(window_update(stream.id, length - num_bytes))
