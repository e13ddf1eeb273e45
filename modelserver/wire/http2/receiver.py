"""Takes a connection's bytes apart: frames, header blocks, bodies (RFC 9113, 4 and 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from modelserver.telemetry.wire import Violation
from modelserver.wire.http2.admission import Admission
from modelserver.wire.http2.control import check_dependency
from modelserver.wire.http2.frame import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HAS_PRIORITY,
    HEAD_BYTES,
    HEADERS,
    MAX_31_BITS,
    PADDED,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    ConnectionFault,
    ErrorCode,
    protocol_fault,
    too_much,
    unpack_head,
    unpack_u32,
    window_update,
)
from modelserver.wire.http2.grpc_call import GrpcCall
from modelserver.wire.http2.message import MIN_BUFFER_BYTES, PREFIX_BYTES, unpack_prefix
from modelserver.wire.http2.protection import Closed
from modelserver.wire.http2.stream import FRESH, RUNNING, Http2Stream

if TYPE_CHECKING:
    from modelserver.wire.http2.connection import Http2Connection

Octets = bytes | bytearray
# Reads what it can of data[position:end] and returns the position of what it could not.
Stage = Callable[[Octets, memoryview, int, int], int]

# A frame that must be there as a whole before it means something is not larger.
_MAX_WHOLE_BYTES: Final = 64 * 1024
# With so much of a DATA frame still to come, it is received straight into the message's memory.
_MIN_DIRECT_BYTES: Final = 32 * 1024
# DATA frames below this size that end nothing are a waste; empty ones more so.
_TINY_BYTES: Final = 256
_EMPTY_GLITCHES: Final = 10
_PRIORITY_BYTES: Final = 5
PREFACE_NAME: Final = "the preface"
FIRST_SETTINGS: Final = "the first SETTINGS"


class Receiver:
    """The receiving half of a connection. Event loop thread only.

    `buffer` and `received` are the connection's `get_buffer` and `buffer_updated`. The bytes go through the
    stage that is due: preface, first SETTINGS, then frames, with stages for what goes on behind its frame's head
    (payloads) and for header blocks in several frames. What a stage cannot read yet is kept and comes again
    with what follows.
    """

    __slots__ = (
        "_admission",
        "_arena",
        "_backlog",
        "_block",
        "_block_flags",
        "_block_id",
        "_carry",
        "_connection",
        "_connection_window",
        "_inline_limit",
        "_is_direct",
        "_max_frame",
        "_max_new_streams",
        "_num_continuations",
        "_num_openable",
        "_padding_left",
        "_payload_bytes",
        "_payload_ends",
        "_payload_left",
        "_payload_stream",
        "_stage",
        "_uncredited",
        "awaited",
        "has_backlog",
    )

    def __init__(self, connection: Http2Connection) -> None:
        limits = connection.context.limits
        self._connection = connection
        self._admission = Admission(connection)
        self._arena = connection.context.arena
        self._max_frame = limits.http2.max_frame_bytes
        self._max_new_streams = limits.http2.max_new_streams_per_turn
        self._connection_window = max(limits.http2.connection_window_bytes, DEFAULT_WINDOW_BYTES)
        # A DATA frame up to this size, with a whole message in it, is within all limits.
        self._inline_limit = PREFIX_BYTES + min(
            limits.http2.initial_window_bytes - PREFIX_BYTES, limits.max_message_bytes, MIN_BUFFER_BYTES
        )
        self._stage: Stage = self._read_preface
        # What must be complete soon, if anything.
        self.awaited: str | None = PREFACE_NAME
        # The beginning of something that is not complete.
        self._carry = b""
        # What is left over because the connection has had its turn.
        self._backlog = b""
        self.has_backlog = False
        self._num_openable = self._max_new_streams
        # DATA that was received and not given back to the connection's window.
        self._uncredited = 0
        # The payload that is being read, and the padding behind it.
        self._payload_stream: Http2Stream | None = None
        self._payload_bytes = 0
        self._payload_left = 0
        self._padding_left = 0
        self._payload_ends = False
        self._is_direct = False
        # The header block that is not complete.
        self._block = b""
        self._block_id = 0
        self._block_flags = 0
        self._num_continuations = 0

    # Bytes.

    def buffer(self) -> memoryview:
        """Where the next bytes are to be received."""
        stream = self._payload_stream
        if stream is not None and self._payload_left >= _MIN_DIRECT_BYTES and not self._carry and stream.is_open:
            room = stream.room()
            if room is not None and len(room) >= _MIN_DIRECT_BYTES:
                self._is_direct = True
                return room[: self._payload_left]
        self._is_direct = False
        carry = self._carry
        if not carry:
            return self._arena.view
        self._arena.view[: len(carry)] = carry
        return self._arena.view[len(carry) :]

    def received(self, num_bytes: int) -> None:
        """So many bytes are in what `buffer` returned. Raises ConnectionFault."""
        arena = self._arena
        if self._is_direct:
            self._is_direct = False
            assert self._payload_stream is not None, "a stream gave the room"
            self._payload_stream.filled(num_bytes)
            self._payload_left -= num_bytes
            self._read(b"", arena.view, 0, 0)
        elif self.has_backlog:
            self._backlog += arena.view[len(self._carry) : len(self._carry) + num_bytes]
        else:
            self._read(arena.memory, arena.view, 0, len(self._carry) + num_bytes)

    def feed(self, data: bytes) -> None:
        """Bytes that were received elsewhere. Raises ConnectionFault."""
        data = self._carry + data
        self._read(data, memoryview(data), 0, len(data))

    def go_on(self) -> None:
        """It is the connection's turn again to have its backlog read. Raises ConnectionFault."""
        backlog, self._backlog, self.has_backlog = self._backlog, b"", False
        self._read(backlog, memoryview(backlog), 0, len(backlog))

    def discard(self) -> None:
        """From now on nothing is read any more."""
        self._stage = _discard
        self._carry = self._backlog = self._block = b""
        self.has_backlog = False
        self._payload_stream = None
        self._payload_left = 0

    def num_missing(self, stream: Http2Stream) -> int:
        """Bytes of the stream's DATA frame whose head has come and they have not."""
        return self._payload_left if stream is self._payload_stream else 0

    def _read(self, data: Octets, view: memoryview, position: int, end: int) -> None:
        # Dropped before reading: what a fault leaves behind is not read again.
        self._carry = b""
        self._num_openable = self._max_new_streams
        while True:
            stage = self._stage
            position = stage(data, view, position, end)
            if stage is self._stage:  # it needs more
                break
        if self.has_backlog:
            self._backlog = view[position:end].tobytes()
        elif position < end:
            self._carry = view[position:end].tobytes()
        if self._uncredited >= self._connection_window >> 2:
            self._connection.sender.frames.append(window_update(0, self._uncredited))
            self._uncredited = 0

    # Stages.

    def _read_preface(self, data: Octets, _view: memoryview, position: int, end: int) -> int:
        begin = data[position : min(end, position + len(PREFACE))]
        if not PREFACE.startswith(begin):
            raise ConnectionFault(
                ErrorCode.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface", Violation.BAD_PREFACE
            )
        if len(begin) < len(PREFACE):
            return position
        self._stage = self._read_first_settings
        self.awaited = FIRST_SETTINGS
        return position + len(PREFACE)

    def _read_first_settings(self, data: Octets, view: memoryview, position: int, end: int) -> int:
        if end - position < HEAD_BYTES:
            return position
        length, kind, flags, stream_id = _read_head(data, position)
        if kind != SETTINGS or flags & ACK:
            raise protocol_fault(f"the first frame must be SETTINGS, got one of type {kind}")
        self._check_size(length)
        stop = position + HEAD_BYTES + length
        if stop > end:
            return self._wait(kind, length, position)
        self._connection.control.take(kind, flags, stream_id, view[stop - length : stop].tobytes())
        self._stage = self._read_frames
        self.awaited = None
        return stop

    def _read_frames(self, data: Octets, view: memoryview, position: int, end: int) -> int:  # noqa: C901
        """Frame after frame.

        One function for the frames that make up small unary calls, of which there may be 100,000 a second: each
        call of a function here costs more than the check in it. All else is passed on.
        """
        connection = self._connection
        streams, known = connection.streams, self._admission.known
        max_frame, inline_limit = self._max_frame, self._inline_limit
        while end - position >= HEAD_BYTES:
            high, low, kind, flags, stream_id = unpack_head(data, position)
            length: int = high << 8 | low
            start = position + HEAD_BYTES
            stop = start + length
            if length > max_frame:
                self._check_size(length)
            if kind == DATA:
                stream = streams.get(stream_id)
                if (
                    flags == END_STREAM
                    and stop <= end
                    and stream is not None
                    and stream.phase == FRESH
                    and PREFIX_BYTES <= length <= inline_limit
                ):
                    # The one message of a unary call, if it is whole and plain.
                    if TYPE_CHECKING:
                        assert isinstance(stream, GrpcCall)
                    is_compressed, size = unpack_prefix(data, start)
                    route = stream.route
                    if not is_compressed and size + PREFIX_BYTES == length and route.content_length in (None, length):
                        self._uncredited += length
                        if self._uncredited > self._connection_window:
                            raise _over_connection_window()
                        stream.is_ended = True
                        stream.message = view[start + PREFIX_BYTES : stop].tobytes()
                        stream.phase = RUNNING
                        position = stop
                        try:
                            route.handle(stream)
                        except Exception as error:
                            stream.fall(error)
                        continue
                if flags & PADDED and end == start and length:
                    return position
                return self._begin_payload(data, start, length, flags, stream_id & MAX_31_BITS)
            if stop > end:
                return self._wait(kind, length, position)
            if kind == HEADERS:
                if flags | END_STREAM == END_HEADERS | END_STREAM:
                    block = view[start:stop].tobytes()
                    found = known.get(block)
                    if (
                        found is not None
                        and connection.last_stream_id < stream_id <= connection.last_admissible_id
                        and stream_id & 1
                        and len(streams) < connection.max_open
                    ):
                        # One more request like an earlier one.
                        connection.last_stream_id = stream_id
                        opened = streams[stream_id] = found.open(connection, stream_id, found)
                        if flags & END_STREAM:
                            connection.end_of(opened)
                    else:
                        self._admission.take(stream_id & MAX_31_BITS, flags, block)
                else:
                    block = self._block_of(view, start, stop, flags, stream_id & MAX_31_BITS)
                    if not flags & END_HEADERS:
                        self._begin_block(stream_id & MAX_31_BITS, flags, block)
                        return stop
                    self._admission.take(stream_id & MAX_31_BITS, flags, block)
                position = stop
                connection.num_opened += 1
                self._num_openable -= 1
                if not self._num_openable:
                    self.has_backlog = position < end
                    return position
            elif kind == WINDOW_UPDATE and length == 4:
                increment = unpack_u32(data, start)[0] & MAX_31_BITS
                connection.control.take_window_update(stream_id & MAX_31_BITS, increment)
                position = stop
            else:
                self._take_other(kind, flags, stream_id & MAX_31_BITS, view[start:stop].tobytes())
                position = stop
        return position

    def _read_payload(self, _data: Octets, view: memoryview, position: int, end: int) -> int:
        """The rest of a DATA frame, or of one that is skipped."""
        stream = self._payload_stream
        if self._payload_left:
            num_bytes = min(self._payload_left, end - position)
            self._payload_left -= num_bytes
            if num_bytes and stream is not None and stream.is_open:
                stream.receive(view[position : position + num_bytes])
            position += num_bytes
            if self._payload_left:
                return position
        num_bytes = min(self._padding_left, end - position)
        self._padding_left -= num_bytes
        position += num_bytes
        if not self._padding_left:
            self._stage = self._read_frames
            self._end_payload(stream)
        return position

    def _read_continuation(self, data: Octets, view: memoryview, position: int, end: int) -> int:
        """The rest of a header block; nothing else may come in between."""
        if end - position < HEAD_BYTES:
            return position
        length, kind, flags, stream_id = _read_head(data, position)
        if kind != CONTINUATION or stream_id != self._block_id:
            raise protocol_fault(f"the header block of stream {self._block_id} must go on in CONTINUATION frames")
        self._check_size(length)
        limits = self._connection.context.limits.head
        self._num_continuations += 1
        num_bytes = len(self._block) + length
        if self._num_continuations > limits.max_continuations or num_bytes > limits.max_header_block_bytes:
            raise too_much(Violation.TOO_MANY_CONTINUATIONS)
        stop = position + HEAD_BYTES + length
        if stop > end:
            self._num_continuations -= 1  # it comes again
            return position
        self._block += view[stop - length : stop]
        if flags & END_HEADERS:
            block, self._block = self._block, b""
            self._stage = self._read_frames
            self.awaited = None
            self._admission.take(self._block_id, self._block_flags, block)
            return stop
        return self._read_continuation(data, view, stop, end)  # there are few of them

    # Parts of stages.

    def _check_size(self, length: int) -> None:
        if length > self._max_frame:
            raise ConnectionFault(
                ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes, more than the announced {self._max_frame}"
            )

    def _wait(self, kind: int, length: int, position: int) -> int:
        """The frame has not come as a whole. One that is too large to wait for is skipped, if it may be."""
        if length <= _MAX_WHOLE_BYTES:
            return position
        if kind == HEADERS:
            raise too_much(Violation.TOO_MANY_CONTINUATIONS)
        if kind != GOAWAY and self._connection.control.knows(kind):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} with {length} bytes")
        self._connection.count_glitches(1)
        self._payload_stream = None
        self._payload_left = length
        self._padding_left = 0
        self._stage = self._read_payload
        return position + HEAD_BYTES

    def _take_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        control = self._connection.control
        if control.knows(kind):
            control.take(kind, flags, stream_id, payload)
        else:
            self._connection.count_glitches(1)

    def _begin_payload(self, data: Octets, position: int, length: int, flags: int, stream_id: int) -> int:
        """The head of a DATA frame was read, and it is not a whole small call."""
        num_bytes = length
        if flags & PADDED:
            # The first byte tells how many follow the content.
            if not length or data[position] >= length:
                raise protocol_fault(f"DATA on stream {stream_id} has more padding than bytes")
            num_bytes -= data[position] + 1
            self._padding_left = data[position]
            position += 1
        else:
            self._padding_left = 0
        self._uncredited += length
        if self._uncredited > self._connection_window:
            raise _over_connection_window()
        stream = self._connection.streams.get(stream_id)
        if stream is None:
            self._check_late_data(stream_id)
        else:
            _count_data(stream, length, num_bytes)
        self._payload_stream = stream
        self._payload_bytes = length
        self._payload_left = num_bytes
        self._payload_ends = bool(flags & END_STREAM)
        self._stage = self._read_payload
        return position

    def _check_late_data(self, stream_id: int) -> None:
        """DATA on a stream that is not open: in flight when we reset it, or wrong."""
        if self._connection.is_idle(stream_id):
            raise protocol_fault(f"DATA on stream {stream_id}, which is not open")
        if stream_id > self._connection.last_stream_id:
            return
        how = self._connection.closed.get(stream_id)
        if how is not Closed.RESET_BY_US:
            text = "has closed" if how is None else f"was {how.value}"
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"DATA on stream {stream_id}, which {text}")

    def _end_payload(self, stream: Http2Stream | None) -> None:
        """All of a DATA frame has come."""
        self._payload_stream = None
        connection = self._connection
        if self._payload_ends:
            if stream is not None and stream.is_open:
                connection.end_of(stream)
        elif self._payload_bytes < _TINY_BYTES and (stream is None or stream.is_within_message):
            connection.count_glitches(1 if self._payload_bytes else _EMPTY_GLITCHES)

    def _block_of(self, view: memoryview, start: int, stop: int, flags: int, stream_id: int) -> bytes:
        """The part of a header block that a HEADERS frame has, without padding and priority."""
        if flags & PADDED:
            padding = view[start] if start < stop else 0
            start += 1
            stop -= padding
        if flags & HAS_PRIORITY and stop - start >= _PRIORITY_BYTES:
            check_dependency(stream_id, view[start:stop].tobytes())
            start += _PRIORITY_BYTES
        elif flags & HAS_PRIORITY:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"HEADERS on stream {stream_id} is cut off")
        if start > stop:
            raise protocol_fault(f"HEADERS on stream {stream_id} has more padding than bytes")
        return view[start:stop].tobytes()

    def _begin_block(self, stream_id: int, flags: int, block: bytes) -> None:
        self._block = block
        self._block_id = stream_id
        self._block_flags = flags
        self._num_continuations = 0
        self._stage = self._read_continuation
        self.awaited = f"the rest of the header block of stream {stream_id}"


def _read_head(data: Octets, position: int) -> tuple[int, int, int, int]:
    """Length, type, flags and stream id of the frame at `position`."""
    high, low, kind, flags, stream_id = unpack_head(data, position)
    return high << 8 | low, kind, flags, stream_id & MAX_31_BITS


def _discard(_data: Octets, _view: memoryview, _position: int, end: int) -> int:
    """The stage of a connection that reads nothing more."""
    return end


def _count_data(stream: Http2Stream, length: int, num_bytes: int) -> None:
    """Hold a DATA frame of `length`, `num_bytes` without padding, to the rules of its stream."""
    if stream.is_ended:
        raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"DATA after the end of stream {stream.id}")
    stream.receive_window -= length
    # Before it knows our settings the client goes by the default, which may be more.
    if stream.receive_window < 0 and length and not stream.connection.control.num_unacknowledged:
        raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, f"DATA on stream {stream.id} is over its window")
    stream.num_received += num_bytes
    stream.check_length(is_complete=False)
    if length > num_bytes:
        # Nobody consumes padding.
        stream.receive_window += length - num_bytes
        stream.connection.sender.frames.append(window_update(stream.id, length - num_bytes))


def _over_connection_window() -> ConnectionFault:
    return ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA is over the connection's window")
