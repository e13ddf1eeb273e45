"""A connection to a server over HTTP/2 (RFC 9113): many calls at once, whose answers are handed on as they arrive."""

from __future__ import annotations

import abc
import asyncio
import struct
from collections.abc import Sequence
from time import monotonic, monotonic_ns
from typing import Final

from modelserver.client.h2_heads import AnswerBlock, AnswerReader, RequestBlocks, unpadded
from modelserver.core.tensor import Buffer
from modelserver.errors import UnavailableError
from modelserver.wire.context import Arena
from modelserver.wire.http2.frame import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD_BYTES,
    HEADERS,
    MAX_31_BITS,
    PADDED,
    PING,
    PREFACE,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    WINDOW_UPDATE,
    ConnectionFault,
    ErrorCode,
    frame,
    goaway,
    pack_head,
    ping_ack,
    protocol_fault,
    rst_stream,
    unpack_head,
    unpack_u32,
    window_update,
)
from modelserver.wire.http2.hpack_tables import Field
from modelserver.wire.http2.sender import Outgoing, Sender, SendingStream
from modelserver.wire.http2.settings import (
    DEFAULT_HEADER_TABLE_BYTES,
    ENABLE_PUSH,
    HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    read_settings,
)

# Of one SETTINGS frame.
_MAX_SETTINGS: Final = 256
# The connection's window, which is wide, is returned in steps of this size.
_WINDOW_STEP: Final = 1 << 28
# Of what is not sent yet, in the transport.
_WRITE_BUFFER_BYTES: Final = 1 << 20
# A frame that is read as a whole: all but DATA.
_MAX_WHOLE_BYTES: Final = 1 << 18
# A read of many small frames: it is copied as a whole, since slices of bytes cost less than those of a view.
_SMALL_BYTES: Final = 1 << 14
_FINISH_POLL_S: Final = 0.005
# Frames of a fixed size.
_SIZES: Final = {RST_STREAM: 4, WINDOW_UPDATE: 4, PING: 8}


class AskingCall(abc.ABC):
    """A call that waits for a server's answer, as its connection sees it."""

    __slots__ = ()

    @abc.abstractmethod
    def begun(self, head: AnswerBlock) -> None:
        """The head of the answer: `more` until `ended`, or `lost`."""

    @abc.abstractmethod
    def more(self, data: bytes) -> None: ...

    @abc.abstractmethod
    def ended(self, trailers: AnswerBlock | None) -> None:
        """The answer is complete; None: by data, which no gRPC server does. The first block may be this one."""

    @abc.abstractmethod
    def lost(self, reason: str, code: int | None, *, is_refused: bool) -> None:
        """The stream was reset with `code`, or the connection broke.

        `is_refused`: the server has not begun to work on the call, so it may be sent again.
        """


class SentCall(SendingStream):
    """A call on its connection, for whoever asks. `num_unread` are bytes received and not returned to its window."""

    __slots__ = ("_connection", "asking", "id", "is_whole", "num_unread", "outgoing", "send_window")

    def __init__(self, connection: H2Connection, stream_id: int, asking: AskingCall, send_window: int) -> None:
        self._connection = connection
        self.id = stream_id
        self.asking = asking
        self.send_window = send_window
        self.outgoing: Outgoing | None = None
        # Whether our side has ended.
        self.is_whole = False
        self.num_unread = 0

    def send(self, data: Buffer, *, is_whole: bool) -> None:
        """Send more of the request, soon."""
        connection = self._connection
        self.is_whole = is_whole
        if is_whole or (data and not connection.sender.send_data(self, (data,))):
            connection.sender.queue(self, (data,), b"" if is_whole else None)
        connection.schedule_flush()

    def reset(self) -> None:
        """The answer is no longer wanted; whoever asks is not called again."""
        connection = self._connection
        if connection.calls.pop(self.id, None) is not None:
            connection.sender.drop(self)
            connection.sender.frames.append(rst_stream(self.id, ErrorCode.CANCEL))
            connection.schedule_flush()

    def widen(self) -> None:
        """What was received has been read: let the server send more."""
        connection = self._connection
        if self.num_unread >= connection.window_bytes // 4 and self.id in connection.calls:
            connection.sender.frames.append(window_update(self.id, self.num_unread))
            self.num_unread = 0
            connection.schedule_flush()


class H2Connection(asyncio.BufferedProtocol):
    """One connection. Event loop thread only."""

    __slots__ = (
        "_arena",
        "_blocks",
        "_carry",
        "_fields",
        "_frame_bytes",
        "_has_table",
        "_heads",
        "_is_due",
        "_loop",
        "_next_id",
        "_num_unreturned",
        "_ready",
        "_transport",
        "calls",
        "is_leaving",
        "max_calls",
        "read_ns",
        "sender",
        "window_bytes",
    )

    def __init__(
        self,
        arena: Arena,
        fields: Sequence[Field] = (),
        *,
        frame_bytes: int = DEFAULT_FRAME_BYTES,
        window_bytes: int = MAX_31_BITS,
    ) -> None:
        """`fields` is the usual head of requests; `frame_bytes` the largest frame that we announce to accept.

        With smaller `window_bytes`, what a call may be sent before it is read, its owner can hold a server back.
        """
        self._arena = arena
        self._fields = fields
        self._frame_bytes = frame_bytes
        self.window_bytes = window_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self.sender: Sender
        self.calls: dict[int, SentCall] = {}
        # How many the server allows at once; known after `greet`.
        self.max_calls = MAX_31_BITS
        # No new calls: the server has said so, or the connection is lost.
        self.is_leaving = False
        # The monotonic clock at the last read.
        self.read_ns = 0
        self._ready = asyncio.Event()
        self._next_id = 1
        self._carry = b""
        self._heads = AnswerReader()
        self._num_unreturned = 0
        self._is_due = False
        # The blocks of the usual head, once the first of them was sent.
        self._blocks: RequestBlocks | None = None
        self._has_table = True

    async def greet(self, timeout_s: float) -> None:
        """Wait for the settings of the server to which a connection was opened. Raises UnavailableError."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            self.lose("no settings")
            raise UnavailableError(f"no HTTP/2 within {timeout_s:g} s: is it the HTTP port?") from None
        if self.is_leaving:
            raise UnavailableError("the server closed the connection: does it speak gRPC?")

    @property
    def has_room(self) -> bool:
        """Whether another call may begin."""
        return not self.is_leaving and len(self.calls) < self.max_calls and not self._transport.is_closing()

    def open(
        self, asking: AskingCall, data: Buffer, block: bytes = b"", more: bytes = b"", is_whole: bool = True
    ) -> SentCall:
        """Begin a call, while there `has_room`: with the head `block`, or the usual one and `more`.

        Both are blocks of literals that change no table. Unless it `is_whole`, more data follows by `send`.
        """
        sender = self.sender
        stream_id = self._next_id
        self._next_id = stream_id + 2
        if stream_id + 2 > MAX_31_BITS:
            self.is_leaving = True
        call = self.calls[stream_id] = SentCall(self, stream_id, asking, sender.initial_window)
        if not block:
            blocks = self._blocks
            block = self._first_block() if blocks is None else blocks.again
            if more:
                block += more
        if is_whole:
            call.is_whole = True
            sender.send_whole(call, block, data)
            if not self._is_due:
                self.schedule_flush()
        else:
            sender.send_block(stream_id, block)
            call.send(data, is_whole=False)
        return call

    def _first_block(self) -> bytes:
        self._blocks = blocks = RequestBlocks(self._fields, has_table=self._has_table)
        return blocks.first

    def schedule_flush(self) -> None:
        """There is data to send; it leaves at the end of this turn of the loop."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        if self.sender.flush():
            self.schedule_flush()
        self.sender.finished.clear()

    def close(self) -> None:
        """Close when the last call is over."""
        self.is_leaving = True
        if not self.calls:
            self._transport.abort()

    async def finish(self, timeout_s: float) -> None:
        """End the calls that are open and let the server end them too, then close; at most `timeout_s`.

        A server may do badly when many streams vanish at once: a bench that has what it wants leaves politely.
        """
        for call in self.calls.values():
            if not call.is_whole:
                call.send(b"", is_whole=True)
        ends_s = monotonic() + timeout_s
        # Polled, once per run: an event would cost every call a look at it.
        while self.calls and not self._transport.is_closing() and monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(_FINISH_POLL_S)
        if self.calls:
            self.abandon()
        else:
            self.sender.frames.append(goaway(0, ErrorCode.NO_ERROR))
            self._flush()
            self._transport.close()

    def abandon(self) -> None:
        """Close; whoever asks is not called again."""
        self.calls.clear()
        self.lose("")

    def lose(self, reason: str) -> None:
        """Give the connection up: its calls are lost for `reason`."""
        self._transport.abort()
        self._lose(reason)

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write like asyncio.Transport without inheriting from it.
        self._transport = transport  # type: ignore[assignment]
        self.sender = Sender(self._transport, _WRITE_BUFFER_BYTES)
        settings = ((ENABLE_PUSH, 0), (INITIAL_WINDOW_SIZE, self.window_bytes), (MAX_FRAME_SIZE, self._frame_bytes))
        payload = b"".join(struct.pack(">HI", *setting) for setting in settings)
        widening = window_update(0, MAX_31_BITS - DEFAULT_WINDOW_BYTES)
        self._transport.write(PREFACE + frame(SETTINGS, 0, 0, payload) + widening)

    def get_buffer(self, _sizehint: int) -> memoryview:
        carry, view = self._carry, self._arena.view
        if not carry:
            return view
        view[: len(carry)] = carry
        return view[len(carry) :]

    def buffer_updated(self, nbytes: int) -> None:
        self.read_ns = monotonic_ns()
        end = len(self._carry) + nbytes
        self._carry = b""
        view = self._arena.view
        received = view[:end].tobytes() if end <= _SMALL_BYTES else view
        # Requests that are sent for answers of one read leave together.
        self._is_due = True
        try:
            position = self._read(received, end)
        except ConnectionFault as fault:
            self._transport.abort()
            self._lose(f"the server broke a rule of HTTP/2: {fault.text}")
            return
        if position < end:
            self._carry = bytes(received[position:end])
        if self._num_unreturned >= _WINDOW_STEP:
            self.sender.frames.append(window_update(0, self._num_unreturned))
            self._num_unreturned = 0
        self._flush()
        if self.is_leaving and not self.calls:
            self._transport.close()

    def eof_received(self) -> None:
        """The transport closes."""

    def connection_lost(self, error: Exception | None) -> None:
        self._lose("the server closed the connection" + (f": {error}" if error else ""))

    def pause_writing(self) -> None:
        self.sender.set_paused(True)

    def resume_writing(self) -> None:
        self.sender.set_paused(False)
        self.schedule_flush()

    def _lose(self, reason: str) -> None:
        self.is_leaving = True
        self._ready.set()
        # The dictionary stays: it may be in the midst of a read.
        calls = list(self.calls.values())
        self.calls.clear()
        for call in calls:
            self.sender.drop(call)
            call.asking.lost(reason, None, is_refused=False)

    # Frames.

    def _read(self, received: bytes | memoryview, end: int) -> int:  # noqa: C901
        """Read whole frames; returns where the rest begins. Raises ConnectionFault.

        One function: this is the cost of a request.
        """
        known = self._heads.known
        calls = self.calls
        position = 0
        while end - position >= HEAD_BYTES:
            high, low, kind, flags, stream_id = unpack_head(received, position)
            start = position + HEAD_BYTES
            length = high << 8 | low
            stop = start + length
            if stop > end:
                is_split = kind == DATA and not flags & PADDED
                if length > self._frame_bytes or not (is_split or length <= _MAX_WHOLE_BYTES):
                    raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
                if not is_split or start == end:
                    return position
                # The part that is there is a frame of its own; the rest becomes another.
                left = stop - end
                self._carry = pack_head(left >> 8, left & 0xFF, DATA, flags, stream_id)
                stop, flags = end, 0
            position = stop
            if kind == DATA:
                num_bytes = stop - start
                self._num_unreturned += num_bytes
                call = calls.get(stream_id)
                if call is None:
                    continue
                call.num_unread += num_bytes
                if call.num_unread > self.window_bytes:
                    text = f"DATA on stream {stream_id} is over its window"
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, text)
                piece = received[start:stop]
                if not isinstance(piece, bytes):
                    piece = piece.tobytes()
                if flags & PADDED:
                    piece = unpadded(flags, piece)
                if piece:
                    call.asking.more(piece)
                if flags & END_STREAM:
                    self._end(call, None)
            elif kind == HEADERS and flags & END_HEADERS and not flags & ~(END_HEADERS | END_STREAM):
                block = received[start:stop]
                if not isinstance(block, bytes):
                    block = block.tobytes()
                head = known.get(block) or self._heads.read(block)
                if flags & END_STREAM:
                    # As in `_end`.
                    call = calls.pop(stream_id, None)
                    if call is not None:
                        if not call.is_whole or call.outgoing is not None:
                            self._cut(call)
                        call.asking.ended(head)
                elif (call := calls.get(stream_id)) is not None:
                    call.asking.begun(head)
            else:
                self._take_other(kind, flags, stream_id, bytes(received[start:stop]))
        return position

    def _end(self, call: SentCall, trailers: AnswerBlock | None) -> None:
        if self.calls.pop(call.id, None) is None:
            return  # its owner has reset it
        if not call.is_whole or call.outgoing is not None:
            self._cut(call)
        call.asking.ended(trailers)

    def _cut(self, call: SentCall) -> None:
        """Send no more of a request whose answer has ended before it."""
        self.sender.drop(call)
        self.sender.frames.append(rst_stream(call.id, ErrorCode.NO_ERROR))

    def _take_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Raises ConnectionFault."""
        if len(payload) != _SIZES.get(kind, len(payload)) or (kind == GOAWAY and len(payload) < 8):
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} with {len(payload)} bytes")
        if kind == WINDOW_UPDATE:
            self._take_window_update(stream_id, payload)
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)
        elif kind == PING and not flags & ACK:
            self.sender.frames.append(ping_ack(payload))
        elif kind == RST_STREAM:
            call = self.calls.pop(stream_id, None)
            if call is not None:
                self.sender.drop(call)
                code = unpack_u32(payload)[0]
                reason = f"the server reset the stream: {_name(code)}"
                call.asking.lost(reason, code, is_refused=code == ErrorCode.REFUSED_STREAM)
        elif kind == GOAWAY:
            self._take_goaway(payload)
        elif kind in (HEADERS, CONTINUATION):
            self._take_part(kind, flags, stream_id, payload)
        elif kind == PUSH_PROMISE:
            raise protocol_fault("the server pushes, which it was told not to do")

    def _take_part(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """A head in several frames, or with padding."""
        complete = self._heads.read_part(kind, flags, stream_id, payload)
        call = self.calls.get(stream_id)
        if complete is None or call is None:
            return
        head, ends = complete
        if ends:
            self._end(call, head)
        else:
            call.asking.begun(head)

    def _take_window_update(self, stream_id: int, payload: bytes) -> None:
        increment = unpack_u32(payload)[0] & MAX_31_BITS
        if not stream_id:
            self.sender.add_connection_window(increment)
            return
        call = self.calls.get(stream_id)
        if call is not None:
            call.send_window += increment
            if call.send_window > MAX_31_BITS:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the window of a stream is over 2^31-1 bytes")
            self.sender.add_window(call)

    def _take_settings(self, payload: bytes) -> None:
        sender = self.sender
        for identifier, value in read_settings(payload, _MAX_SETTINGS):
            if identifier == INITIAL_WINDOW_SIZE:
                sender.set_initial_window(value, self.calls.values())
            elif identifier == MAX_FRAME_SIZE:
                sender.set_max_frame(value)
            elif identifier == MAX_CONCURRENT_STREAMS:
                self.max_calls = value
            elif identifier == HEADER_TABLE_SIZE and value < DEFAULT_HEADER_TABLE_BYTES:
                sender.forget_table()
                self._blocks, self._has_table = None, False
        sender.frames.append(SETTINGS_ACK)
        self._ready.set()

    def _take_goaway(self, payload: bytes) -> None:
        """No new calls here. Those that the server has not taken may go to another one."""
        self.is_leaving = True
        last_id = unpack_u32(payload)[0] & MAX_31_BITS
        text = payload[8:108].decode(errors="replace")
        reason = f"the server is going away, {_name(unpack_u32(payload, 4)[0])}: {text}"
        for call in [call for call in self.calls.values() if call.id > last_id]:
            del self.calls[call.id]
            self.sender.drop(call)
            call.asking.lost(reason, None, is_refused=True)


def _name(code: int) -> str:
    try:
        return ErrorCode(code).name
    except ValueError:
        return f"code {code}"
