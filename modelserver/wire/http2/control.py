"""Frames that are about the connection, or about a stream but not its content (RFC 9113, 6.2 to 6.10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from modelserver.core.tensor import Buffer
from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2 import settings
from modelserver.wire.http2.closing import Closing
from modelserver.wire.http2.frame import (
    ACK,
    CONTINUATION,
    GOAWAY,
    HAS_PRIORITY,
    MAX_31_BITS,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    WINDOW_UPDATE,
    ConnectionFault,
    ErrorCode,
    ping_ack,
    protocol_fault,
    too_much,
    unpack_u32,
)
from modelserver.wire.http2.stream import Connection
from modelserver.wire.limits import HeadLimits

# WINDOW_UPDATEs that are free: this many at first, for each stream, for each turn of sending, and one per this many
# bytes sent (HAProxy returns credit for each piece that it reads, to stream and connection).
_FREE_WINDOW_UPDATES: Final = 64
_FREE_PER_STREAM: Final = 8
_FREE_PER_TURN: Final = 4
_BYTES_PER_FREE: Final = 2048


class ControlFrames:
    """Acts on the control frames that the peer sends on one connection.

    All methods that take a frame raise ConnectionFault for violations. Frames without effect are counted against the
    peer.
    """

    __slots__ = ("_closing", "_connection", "_num_window_updates")

    def __init__(self, connection: Connection, closing: Closing) -> None:
        self._connection = connection
        self._closing = closing
        self._num_window_updates = 0

    def knows(self, kind: int) -> bool:
        """Whether frames of this type have a meaning."""
        return kind in _TAKERS

    def take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """A whole frame of a known type."""
        _TAKERS[kind](self, flags, stream_id, payload)

    def take_window_update(self, stream_id: int, increment: int) -> None:
        """The peer lets us send more."""
        connection = self._connection
        if not increment:
            raise protocol_fault(f"WINDOW_UPDATE of 0 on stream {stream_id}")
        sender = connection.sender
        self._num_window_updates += 1
        num_free = _FREE_PER_STREAM * connection.num_opened + _FREE_PER_TURN * sender.num_turns
        num_free += (sender.num_granted - sender.window) // _BYTES_PER_FREE
        if self._num_window_updates > _FREE_WINDOW_UPDATES + num_free:
            connection.abuse_limits.count_glitches()
        if not stream_id:
            sender.add_connection_window(increment)
            return
        stream = connection.streams.get(stream_id)
        if stream is None:
            self._check_not_idle("WINDOW_UPDATE", stream_id)
        elif stream.send_window + increment > MAX_31_BITS:
            connection.reset(stream, ErrorCode.FLOW_CONTROL_ERROR)
            connection.abuse_limits.count_reset()
        else:
            stream.send_window += increment
            sender.add_window(stream)

    def _take_window_update(self, _flags: int, stream_id: int, payload: bytes) -> None:
        _check_length("WINDOW_UPDATE", payload, 4)
        self.take_window_update(stream_id, unpack_u32(payload)[0] & MAX_31_BITS)

    def _take_priority(self, _flags: int, stream_id: int, payload: bytes) -> None:
        """Priorities are obsolete (RFC 9113, 5.3.2): checked and ignored."""
        if not stream_id:
            raise protocol_fault("PRIORITY on stream 0")
        _check_length("PRIORITY", payload, 5)
        check_dependency(stream_id, payload)
        self._connection.abuse_limits.count_glitches()

    def _take_rst_stream(self, _flags: int, stream_id: int, payload: bytes) -> None:
        _check_length("RST_STREAM", payload, 4)
        self._check_not_idle("RST_STREAM", stream_id)
        stream = self._connection.streams.get(stream_id)
        if stream is not None:
            self._connection.reset_by_peer(stream)
        elif not self._connection.unended.end(stream_id):
            self._connection.abuse_limits.count_glitches()

    def _take_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise protocol_fault(f"SETTINGS on stream {stream_id}")
        if flags & ACK:
            self._take_settings_ack(payload)
            return
        connection = self._connection
        sender = connection.sender
        for identifier, value in settings.read_settings(payload, connection.context.limits.http2.max_settings):
            if identifier == settings.INITIAL_WINDOW_SIZE:
                sender.set_initial_window(value, connection.streams.values())
            elif identifier == settings.MAX_FRAME_SIZE:
                sender.set_max_frame(value)
            elif identifier == settings.HEADER_TABLE_SIZE and value < settings.DEFAULT_HEADER_TABLE_BYTES:
                sender.forget_table()
        connection.abuse_limits.count_answer()
        sender.frames.append(SETTINGS_ACK)

    def _take_settings_ack(self, payload: bytes) -> None:
        _check_length("SETTINGS with ACK", payload, 0)
        if not self._connection.num_unacknowledged:
            raise protocol_fault("an acknowledgement of SETTINGS that were not sent")
        self._connection.num_unacknowledged -= 1

    def _take_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise protocol_fault(f"PING on stream {stream_id}")
        _check_length("PING", payload, 8)
        connection = self._connection
        if flags & ACK:
            self._closing.ping_answered(payload)
            return
        abuse_limits, sender = connection.abuse_limits, connection.sender
        abuse_limits.count_answer()
        abuse_limits.count_ping(
            connection.context.loop.time(), has_streams=bool(connection.streams), progress=sender.progress
        )
        sender.frames.append(ping_ack(payload))

    def _check_not_idle(self, name: str, stream_id: int) -> None:
        if self._connection.is_idle(stream_id):
            raise protocol_fault(f"{name} on stream {stream_id}, which is not open")


def check_dependency(stream_id: int, payload: Buffer) -> None:
    """Raises ConnectionFault for priority fields that make a stream depend on itself."""
    if unpack_u32(payload)[0] & MAX_31_BITS == stream_id:
        raise protocol_fault(f"stream {stream_id} depends on itself")


def _check_length(name: str, payload: bytes, expected: int) -> None:
    if len(payload) != expected:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"{name} has {expected} bytes, got {len(payload)}")


def _check_goaway(_control: ControlFrames, _flags: int, stream_id: int, payload: bytes) -> None:
    """The peer will open no further streams; open ones continue."""
    if stream_id:
        raise protocol_fault(f"GOAWAY on stream {stream_id}")
    if len(payload) < 8:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY has at least 8 bytes, got {len(payload)}")


def _refuse_push_promise(_control: ControlFrames, _flags: int, _stream_id: int, _payload: bytes) -> None:
    raise protocol_fault("PUSH_PROMISE: clients do not push")


def _refuse_continuation(_control: ControlFrames, _flags: int, _stream_id: int, _payload: bytes) -> None:
    raise protocol_fault("CONTINUATION without an open header block")


_TAKERS: Final[dict[int, Callable[[ControlFrames, int, int, bytes], None]]] = {
    PRIORITY: ControlFrames._take_priority,
    RST_STREAM: ControlFrames._take_rst_stream,
    SETTINGS: ControlFrames._take_settings,
    PUSH_PROMISE: _refuse_push_promise,
    PING: ControlFrames._take_ping,
    GOAWAY: _check_goaway,
    WINDOW_UPDATE: ControlFrames._take_window_update,
    CONTINUATION: _refuse_continuation,
}


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
