"""Takes a connection's bytes apart: frames, header blocks, bodies (RFC 9113, 4 and 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2.abuse_limits import Closed
from modelserver.wire.http2.admission import Admission
from modelserver.wire.http2.control import ControlFrames, OpenBlock, part_of_block
from modelserver.wire.http2.frame import (
    DATA,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD_BYTES,
    HEADERS,
    PADDED,
    ConnectionFault,
    ErrorCode,
    Octets,
    protocol_fault,
    read_head,
    read_usual_frame,
    too_much,
    window_update,
)
from modelserver.wire.http2.grpc_call import GrpcCall
from modelserver.wire.http2.message import MIN_BUFFER_BYTES, PREFIX_BYTES
from modelserver.wire.http2.payload import Payload
from modelserver.wire.http2.preface import Preface
from modelserver.wire.http2.stream import FRESH, RUNNING, Connection, Http2Stream

# Reads from data[position:end] and returns the position of the first byte that it could not use yet.
Stage = Callable[[Octets, memoryview, int, int], int]

# The largest frame that must be complete before it can be read.
_MAX_WHOLE_BYTES: Final = 64 * 1024
# Frames out of the ordinary that a connection has read before others have their turn: they cost some microseconds each.
MAX_FRAMES_PER_TURN: Final = 200


class Receiver:
    """The receiving half of a connection. Event loop thread only.

    `buffer` and `received` are the connection's `get_buffer` and `buffer_updated`. The bytes go through the current
    stage: the preface, then frames, with separate stages for payloads, which are read as they arrive, and for header
    blocks in several frames. Bytes that a stage cannot use yet are kept, and read again with the following ones.
    """

    __slots__ = (
        "_admission",
        "_arena",
        "_backlog",
        "_block",
        "_carry",
        "_connection",
        "_connection_window",
        "_control",
        "_is_direct",
        "_max_frame",
        "_max_inline",
        "_max_new_streams",
        "_num_left",
        "_num_openable",
        "_payload",
        "_preface",
        "_stage",
        "_uncredited",
        "has_backlog",
    )

    def __init__(self, connection: Connection, control: ControlFrames) -> None:
        limits = connection.context.limits
        self._connection = connection
        self._control = control
        self._admission = Admission(connection)
        self._arena = connection.context.arena
        self._max_frame = limits.http2.max_frame_bytes
        self._max_new_streams = limits.http2.max_new_streams_per_turn
        self._connection_window = max(limits.http2.connection_window_bytes, DEFAULT_WINDOW_BYTES)
        # A DATA frame up to this size, with a whole message in it, is within all limits.
        self._max_inline = min(
            self._max_frame,
            PREFIX_BYTES
            + min(limits.http2.initial_window_bytes - PREFIX_BYTES, limits.max_message_bytes, MIN_BUFFER_BYTES),
        )
        self._preface = Preface(control, limits.http2.max_settings)
        self._stage: Stage = self._read_beginning
        # The beginning of an incomplete element.
        self._carry = b""
        # Bytes left over because the connection has had its turn.
        self._backlog = b""
        self.has_backlog = False
        self._num_openable = self._max_new_streams
        # Of this turn's frames out of the ordinary.
        self._num_left = MAX_FRAMES_PER_TURN
        # DATA received and not yet returned to the connection's window.
        self._uncredited = 0
        self._payload = Payload()
        self._is_direct = False
        # The header block that is not complete.
        self._block: OpenBlock | None = None

    # Bytes.

    def buffer(self) -> memoryview:
        """Memory for the next bytes."""
        room = None if self._carry else self._payload.room()
        if room is not None:
            self._is_direct = True
            return room
        self._is_direct = False
        carry = self._carry
        if not carry:
            return self._arena.view
        self._arena.view[: len(carry)] = carry
        return self._arena.view[len(carry) :]

    def received(self, num_bytes: int) -> None:
        """This many bytes are in the memory that `buffer` returned. Raises ConnectionFault."""
        arena = self._arena
        if self._is_direct:
            self._is_direct = False
            self._payload.filled(num_bytes)
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
        """From now on nothing more is read."""
        self._stage = _discard
        self._carry = self._backlog = b""
        self.has_backlog = False
        self._block = None
        self._payload = Payload()

    @property
    def awaited(self) -> str | None:
        """The element that must be complete soon, if any."""
        if self._block is not None:
            return f"the rest of the header block of stream {self._block.stream_id}"
        return self._preface.awaited

    def num_missing(self, stream: Http2Stream) -> int:
        """Bytes of the stream's DATA frame that have not arrived, although its head has."""
        return self._payload.num_missing(stream)

    def _read(self, data: Octets, view: memoryview, position: int, end: int) -> None:
        # Dropped before reading, so that bytes are not read again after a fault.
        self._carry = b""
        self._num_openable = self._max_new_streams
        self._num_left = MAX_FRAMES_PER_TURN
        while True:
            stage = self._stage
            position = stage(data, view, position, end)
            if stage is self._stage:  # it needs more, or has had its turn
                break
        if self.has_backlog:
            self._backlog = view[position:end].tobytes()
        elif position < end:
            self._carry = view[position:end].tobytes()
        if self._uncredited >= self._connection_window >> 2:
            self._connection.sender.frames.append(window_update(0, self._uncredited))
            self._uncredited = 0

    # Stages.

    def _read_beginning(self, data: Octets, view: memoryview, position: int, end: int) -> int:
        """The preface and the first SETTINGS."""
        position = self._preface.read(data, view, position, end)
        if self._preface.awaited is None:
            self._stage = self._read_frames
        return position

    def _read_frames(self, data: Octets, view: memoryview, position: int, end: int) -> int:  # noqa: C901
        """Read frame after frame.

        One function for the frames that make up small unary calls, of which there may be 100,000 a second: each call of
        a function here costs more than the check in it. All other frames are passed on.
        """
        connection = self._connection
        streams, known = connection.streams, self._admission.known
        max_frame, max_inline = self._max_frame, self._max_inline
        while True:
            usual = read_usual_frame(data, position, end, max_inline)
            if usual is not None:
                kind, stream_id, payload, stop = usual
                if kind == DATA:
                    stream = streams.get(stream_id)
                    if stream is not None and stream.phase == FRESH:
                        # The one message of a unary call.
                        if TYPE_CHECKING:
                            assert isinstance(stream, GrpcCall)
                        route = stream.route
                        length = stop - position - HEAD_BYTES
                        if route.content_length in (None, length):
                            self._uncredited += length
                            if self._uncredited > self._connection_window:
                                raise _over_connection_window()
                            stream.is_ended = True
                            stream.message = payload
                            stream.phase = RUNNING
                            position = stop
                            try:
                                route.handle(stream)
                            except Exception as error:
                                stream.fall(error)
                            continue
                    elif stream is not None and stream.relays and not (stream.num_received or stream.is_ended):
                        # The same of a call that is passed on as it is.
                        length = stop - position - HEAD_BYTES
                        if stream.route.content_length in (None, length):
                            self._uncredited += length
                            if self._uncredited > self._connection_window:
                                raise _over_connection_window()
                            stream.num_received = length
                            stream.is_ended = True
                            stream.relay(view[stop - length : stop].tobytes())
                            position = stop
                            continue
                elif kind == HEADERS:
                    found = known.get(payload)
                    if (
                        found is not None
                        and connection.last_stream_id < stream_id <= connection.last_admissible_id
                        and stream_id & 1
                        and len(streams) < connection.max_open
                    ):
                        # One more request like an earlier one.
                        connection.last_stream_id = stream_id
                        streams[stream_id] = found.open(connection, stream_id, found)
                    else:
                        self._admission.take(stream_id, END_HEADERS, payload)
                    position = stop
                    connection.num_opened += 1
                    self._num_openable -= 1
                    if not self._num_openable:
                        self.has_backlog = position < end
                        return position
                    continue
                else:
                    self._control.take_window_update(stream_id, payload)
                    position = stop
                    continue
            if end - position < HEAD_BYTES:
                return position
            length, kind, flags, stream_id = read_head(data, position)
            start = position + HEAD_BYTES
            stop = start + length
            if length > max_frame:
                self._check_size(length)
            if kind == DATA:
                if flags & PADDED and end == start and length:
                    return position
                if not self._has_turn():
                    return position
                return self._begin_payload(data, start, length, flags, stream_id)
            if stop > end:
                return self._wait(kind, length, position)
            if kind != HEADERS:
                if not self._has_turn():
                    return position
                position = stop
                self._take_other(kind, flags, stream_id, view[start:stop].tobytes())
                continue
            position = stop
            block = part_of_block(view[start:stop], flags, stream_id)
            if not flags & END_HEADERS:
                self._begin_block(stream_id, flags, block)
                return stop
            self._admission.take(stream_id, flags, block)
            connection.num_opened += 1
            self._num_openable -= 1
            if not self._num_openable:
                self.has_backlog = position < end
                return position

    def _read_payload(self, _data: Octets, view: memoryview, position: int, end: int) -> int:
        """The rest of a DATA frame, or of a skipped frame."""
        payload = self._payload
        position = payload.read(view, position, end)
        if payload.is_complete:
            self._stage = self._read_frames
            ended, num_glitches = payload.finish()
            if ended is not None:
                self._connection.end_of(ended)
            elif num_glitches:
                self._connection.abuse_limits.count_glitches(num_glitches)
        return position

    def _read_continuation(self, data: Octets, view: memoryview, position: int, end: int) -> int:
        """The rest of a header block."""
        if end - position < HEAD_BYTES:
            return position
        block = self._block
        assert block is not None, "a block was begun"
        length, kind, flags, stream_id = read_head(data, position)
        block.check(kind, stream_id, length, self._connection.context.limits.head)
        stop = position + HEAD_BYTES + length
        if stop > end:
            return position
        block.add(view[stop - length : stop])
        if not flags & END_HEADERS:
            return self._read_continuation(data, view, stop, end)  # there are few of them
        self._stage = self._read_frames
        self._block = None
        self._admission.take(block.stream_id, block.flags, block.content)
        return stop

    # Parts of stages.

    def _has_turn(self) -> bool:
        """Whether another frame may be read before other connections have their turn."""
        self._num_left -= 1
        self.has_backlog = self._num_left < 0
        return not self.has_backlog

    def _check_size(self, length: int) -> None:
        if length > self._max_frame:
            raise ConnectionFault(
                ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes, more than the announced {self._max_frame}"
            )

    def _wait(self, kind: int, length: int, position: int) -> int:
        """The frame is incomplete. One that is too large to wait for is skipped, if that is allowed."""
        if length <= _MAX_WHOLE_BYTES:
            return position
        if kind == HEADERS:
            raise too_much(Violation.HEAD_TOO_LARGE)
        if kind != GOAWAY and self._control.knows(kind):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} with {length} bytes")
        self._connection.abuse_limits.count_glitches(1)
        self._payload.skip(length)
        self._stage = self._read_payload
        return position + HEAD_BYTES

    def _take_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        control = self._control
        if control.knows(kind):
            control.take(kind, flags, stream_id, payload)
        else:
            self._connection.abuse_limits.count_glitches(1)

    def _begin_payload(self, data: Octets, position: int, length: int, flags: int, stream_id: int) -> int:
        """The head of a DATA frame was read, and it is not a whole small call."""
        self._uncredited += length
        if self._uncredited > self._connection_window:
            raise _over_connection_window()
        stream = self._connection.streams.get(stream_id)
        if stream is None:
            self._take_late_data(stream_id, flags)
        self._stage = self._read_payload
        padding = data[position] if flags & PADDED and length else 0
        return position + self._payload.begin(stream, stream_id, flags, length, padding)

    def _take_late_data(self, stream_id: int, flags: int) -> None:
        """DATA on a stream that is not open: in flight when we reset or ended it, or an error."""
        if self._connection.is_idle(stream_id):
            raise protocol_fault(f"DATA on stream {stream_id}, which is not open")
        if stream_id > self._connection.last_stream_id:
            return
        how = self._connection.closed.get(stream_id)
        if how is not Closed.RESET_BY_US:
            text = "has closed" if how is None else f"was {how.value}"
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"DATA on stream {stream_id}, which {text}")
        if flags & END_STREAM:
            self._connection.unended.end(stream_id)
        else:
            self._connection.unended.go_on(stream_id)

    def _begin_block(self, stream_id: int, flags: int, block: bytes) -> None:
        self._block = OpenBlock(stream_id, flags, block)
        self._stage = self._read_continuation


def _discard(_data: Octets, _view: memoryview, _position: int, end: int) -> int:
    """The stage of a connection that reads nothing more."""
    return end


def _over_connection_window() -> ConnectionFault:
    return ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA is over the connection's window")
