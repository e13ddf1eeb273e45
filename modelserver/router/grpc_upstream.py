"""Connections to replicas over HTTP/2: many calls each, whose frames are handed on as they arrive."""

from __future__ import annotations

import abc
import asyncio
import ssl
import struct
from contextlib import suppress
from typing import Final

from modelserver.client.address import Address, connect_failure
from modelserver.client.h2_incoming import HeadReader
from modelserver.client.http_pool import CONNECT_TIMEOUT_S
from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError
from modelserver.wire.context import Flushable, WireContext
from modelserver.wire.http2.frame import (
    ACK,
    CONTINUATION,
    DATA,
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
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    WINDOW_UPDATE,
    ConnectionFault,
    ErrorCode,
    frame,
    pack_head,
    ping_ack,
    protocol_fault,
    rst_stream,
    unpack_head,
    unpack_u32,
    window_update,
)
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.sender import Outgoing, Sender, SendingStream
from modelserver.wire.http2.settings import (
    ENABLE_PUSH,
    HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    read_settings,
)
from modelserver.wire.sockets.poller import Poller

# What a replica may send on a call before we have read it, and in one frame.
WINDOW_BYTES: Final = 1 << 20
_MAX_FRAME_BYTES: Final = 1 << 18
_MAX_SETTINGS: Final = 64
# Until the replica's settings arrive.
_FIRST_STREAMS: Final = 100
_MAX_STREAM_ID: Final = (1 << 31) - 1
_STATUS_OK: Final = b"\x88"
_GREETING: Final = (
    PREFACE
    + frame(
        SETTINGS,
        0,
        0,
        b"".join(
            struct.pack(">HI", *setting)
            for setting in (
                (HEADER_TABLE_SIZE, 4096),
                (ENABLE_PUSH, 0),
                (INITIAL_WINDOW_SIZE, WINDOW_BYTES),
                (MAX_FRAME_SIZE, _MAX_FRAME_BYTES),
            )
        ),
    )
    + window_update(0, MAX_31_BITS - DEFAULT_WINDOW_BYTES)
)
# Of the connection's window, which is wide: returned in steps of this size.
_WINDOW_STEP: Final = 1 << 28


class AnswerBlock:
    """A decoded header block of an answer. Equal blocks share one: never change it.

    `block` is the same for clients; `grpc_status` is None in a block that does not end a call.
    """

    __slots__ = ("block", "grpc_status")

    def __init__(self, fields: tuple[tuple[bytes, bytes], ...]) -> None:
        self.block = b"".join([_STATUS_OK if field == (b":status", b"200") else literal(*field) for field in fields])
        status = dict(fields).get(b"grpc-status", b"")
        self.grpc_status = int(status) if status.isdigit() else None


class AskingCall(abc.ABC):
    """A call that waits for a replica's answer, as its connection sees it."""

    __slots__ = ()

    @abc.abstractmethod
    def connected(self, upstream: GrpcUpstream) -> None: ...

    @abc.abstractmethod
    def unreachable(self, reason: str) -> None: ...

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
        """The stream was reset with `code`, or the connection broke. `is_refused`: it was not processed."""


class UpstreamCall(SendingStream):
    """A stream to a replica. `num_unread` are bytes received and not returned to its window."""

    __slots__ = ("asking", "id", "is_whole", "num_unread", "outgoing", "send_window", "upstream")

    def __init__(self, upstream: GrpcUpstream, stream_id: int, asking: AskingCall, send_window: int) -> None:
        self.upstream = upstream
        self.id = stream_id
        self.asking = asking
        self.send_window = send_window
        self.outgoing: Outgoing | None = None
        # Whether our side has ended.
        self.is_whole = False
        self.num_unread = 0

    def send(self, data: Buffer, *, is_whole: bool) -> None:
        """Send more of the request, soon."""
        upstream = self.upstream
        self.is_whole = is_whole
        upstream.sender.queue(self, (data,) if data else (), b"" if is_whole else None)
        upstream.schedule_flush()

    def reset(self) -> None:
        """The answer is no longer wanted."""
        upstream = self.upstream
        if upstream.streams.pop(self.id, None) is not None:
            upstream.sender.drop(self)
            upstream.sender.frames.append(rst_stream(self.id, ErrorCode.CANCEL))
            upstream.schedule_flush()

    def widen(self) -> None:
        """What was received has been read."""
        if self.num_unread >= WINDOW_BYTES // 4:
            self.upstream.sender.frames.append(window_update(self.id, self.num_unread))
            self.num_unread = 0
            self.upstream.schedule_flush()


class GrpcUpstream(asyncio.BufferedProtocol, Flushable):
    """One connection. Event loop thread only."""

    __slots__ = (
        "_arena",
        "_carry",
        "_context",
        "_heads",
        "_is_due",
        "_max_streams",
        "_next_id",
        "_num_unreturned",
        "_pool",
        "_transport",
        "is_leaving",
        "sender",
        "streams",
    )

    def __init__(self, pool: GrpcPool, context: WireContext) -> None:
        self._pool = pool
        self._context = context
        self._arena = context.arena
        self._transport: asyncio.Transport
        self.sender: Sender
        self.streams: dict[int, UpstreamCall] = {}
        self._next_id = 1
        self._max_streams = _FIRST_STREAMS
        self._carry = b""
        self._heads = HeadReader(AnswerBlock)
        self._num_unreturned = 0
        self._is_due = False
        # No new calls: the replica has said so, or the connection is lost.
        self.is_leaving = False

    @property
    def has_room(self) -> bool:
        """Whether another call may begin."""
        return not self.is_leaving and len(self.streams) < self._max_streams and not self._transport.is_closing()

    def open(self, asking: AskingCall, block: bytes) -> UpstreamCall:
        """Begin a call with this header block."""
        stream_id = self._next_id
        self._next_id += 2
        if self._next_id > _MAX_STREAM_ID:
            self.is_leaving = True
        call = self.streams[stream_id] = UpstreamCall(self, stream_id, asking, self.sender.initial_window)
        self.sender.send_block(stream_id, block)
        self.schedule_flush()
        return call

    def schedule_flush(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._context.outbox.add(self)

    def flush(self) -> None:
        self._is_due = False
        if self.sender.flush():
            self.schedule_flush()
        self.sender.finished.clear()

    def close(self) -> None:
        """Close when the last call is over."""
        self.is_leaving = True
        if not self.streams:
            self._transport.abort()

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write like asyncio.Transport without inheriting from it.
        self._transport = transport  # type: ignore[assignment]
        self.sender = Sender(self._context, self._transport)
        self._transport.write(_GREETING)

    def get_buffer(self, _sizehint: int) -> memoryview:
        carry, view = self._carry, self._arena.view
        if not carry:
            return view
        view[: len(carry)] = carry
        return view[len(carry) :]

    def buffer_updated(self, nbytes: int) -> None:
        end = len(self._carry) + nbytes
        self._carry = b""
        # Answers of one read leave together.
        self._is_due = True
        try:
            position = self._read(self._arena.view, end)
        except ConnectionFault as fault:
            self._lose(f"the replica broke a rule of HTTP/2: {fault.text}")
            self._transport.abort()
            return
        if position < end:
            self._carry = self._arena.view[position:end].tobytes()
        if self._num_unreturned >= _WINDOW_STEP:
            self.sender.frames.append(window_update(0, self._num_unreturned))
            self._num_unreturned = 0
        self.flush()
        if self.is_leaving and not self.streams:
            self._transport.close()

    def eof_received(self) -> None:
        """The transport closes."""

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.forget(self)
        self._lose("the connection broke" + (f": {error}" if error else ""))

    def pause_writing(self) -> None:
        self.sender.set_paused(True)

    def resume_writing(self) -> None:
        self.sender.set_paused(False)
        self.schedule_flush()

    # Frames.

    def _read(self, view: memoryview, end: int) -> int:
        """Read whole frames; returns where the rest begins. Raises ConnectionFault."""
        position = 0
        while end - position >= HEAD_BYTES:
            high, low, kind, flags, stream_id = unpack_head(view, position)
            start = position + HEAD_BYTES
            length = high << 8 | low
            stop = start + length
            if stop > end:
                if length > _MAX_FRAME_BYTES:
                    raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
                if kind == DATA and not flags & PADDED and start < end:
                    self._split_data(view, start, end, length, flags, stream_id)
                    return end
                return position
            position = stop
            if kind == DATA:
                self._take_data(view[start:stop], flags, stream_id)
            elif kind == HEADERS and flags & END_HEADERS and not flags & ~(END_HEADERS | END_STREAM):
                block = view[start:stop].tobytes()
                head = self._heads.known.get(block) or self._heads.read(block)
                self._take_head(head, stream_id, ends=bool(flags & END_STREAM))
            else:
                self._take_other(kind, flags, stream_id, view[start:stop].tobytes())
        return position

    def _split_data(self, view: memoryview, start: int, end: int, length: int, flags: int, stream_id: int) -> None:
        """The part of a DATA frame that is there is a frame of its own; the rest becomes another."""
        self._take_data(view[start:end], 0, stream_id)
        left = length - (end - start)
        self._carry = pack_head(left >> 8, left & 0xFF, DATA, flags, stream_id)

    def _take_data(self, data: memoryview, flags: int, stream_id: int) -> None:
        self._num_unreturned += len(data)
        call = self.streams.get(stream_id)
        if call is None:
            return
        call.num_unread += len(data)
        if flags & PADDED:
            if not data or data[0] >= len(data):
                raise protocol_fault("DATA with more padding than bytes")
            data = data[1 : len(data) - data[0]]
        if data:
            call.asking.more(data.tobytes())
        if flags & END_STREAM:
            self._end(call, None)

    def _take_head(self, head: AnswerBlock, stream_id: int, *, ends: bool) -> None:
        call = self.streams.get(stream_id)
        if call is None:
            return
        if ends:
            self._end(call, head)
        else:
            call.asking.begun(head)

    def _end(self, call: UpstreamCall, trailers: AnswerBlock | None) -> None:
        self.streams.pop(call.id, None)
        self.sender.drop(call)
        if not call.is_whole:
            self.sender.frames.append(rst_stream(call.id, ErrorCode.NO_ERROR))
        call.asking.ended(trailers)

    def _take_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Raises ConnectionFault."""
        if kind == WINDOW_UPDATE:
            self._take_window_update(stream_id, payload)
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)
        elif kind == PING and not flags & ACK:
            self.sender.frames.append(ping_ack(payload))
        elif kind == RST_STREAM:
            call = self.streams.pop(stream_id, None)
            if call is not None:
                self.sender.drop(call)
                code = unpack_u32(payload)[0]
                call.asking.lost("the replica reset the call", code, is_refused=code == ErrorCode.REFUSED_STREAM)
        elif kind == GOAWAY:
            self._take_goaway(payload)
        elif kind in (HEADERS, CONTINUATION):
            self._take_part(kind, flags, stream_id, payload)

    def _take_part(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """A block in several frames, or with padding."""
        complete = self._heads.read_part(kind, flags, stream_id, payload)
        if complete is not None:
            head, ends = complete
            self._take_head(head, stream_id, ends=ends)

    def _take_window_update(self, stream_id: int, payload: bytes) -> None:
        increment = unpack_u32(payload)[0] & MAX_31_BITS
        if not stream_id:
            self.sender.add_connection_window(increment)
            return
        call = self.streams.get(stream_id)
        if call is not None:
            call.send_window += increment
            self.sender.add_window(call)

    def _take_settings(self, payload: bytes) -> None:
        sender = self.sender
        for identifier, value in read_settings(payload, _MAX_SETTINGS):
            if identifier == INITIAL_WINDOW_SIZE:
                sender.set_initial_window(value, self.streams.values())
            elif identifier == MAX_FRAME_SIZE:
                sender.set_max_frame(value)
            elif identifier == MAX_CONCURRENT_STREAMS:
                self._max_streams = value
            elif identifier == HEADER_TABLE_SIZE and value < 4096:
                sender.forget_table()
        sender.frames.append(SETTINGS_ACK)

    def _take_goaway(self, payload: bytes) -> None:
        """No new calls here. Those that the replica has not taken may go to another one."""
        self.is_leaving = True
        self._pool.forget(self)
        last_id = unpack_u32(payload)[0] & MAX_31_BITS
        for call in [call for call in self.streams.values() if call.id > last_id]:
            del self.streams[call.id]
            self.sender.drop(call)
            call.asking.lost("the replica is leaving", None, is_refused=True)

    def _lose(self, reason: str) -> None:
        self.is_leaving = True
        streams, self.streams = self.streams, {}
        for call in streams.values():
            call.asking.lost(reason, None, is_refused=False)


class GrpcPool:
    """The connections to one replica, the fewest that its limit of calls allows. Event loop thread only."""

    def __init__(self, address: Address, poller: Poller, context: WireContext) -> None:
        self._address = address
        self._poller = poller
        self._context = context
        self._tls: ssl.SSLContext | None = None
        self._upstreams: list[GrpcUpstream] = []
        self._waiting: list[AskingCall] = []
        self._connecting: asyncio.Task[None] | None = None

    def take(self) -> GrpcUpstream | None:
        """A connection that has room for another call."""
        for upstream in self._upstreams:
            if upstream.has_room:
                return upstream
        return None

    def connect(self, asking: AskingCall) -> None:
        """Open a connection for a call, together with others that wait for one."""
        self._waiting.append(asking)
        if self._connecting is None:
            self._connecting = self._context.loop.create_task(self._connect(), name=f"connect to {self._address}")

    def stop_waiting(self, asking: AskingCall) -> None:
        """The call needs no connection any more."""
        with suppress(ValueError):
            self._waiting.remove(asking)

    def forget(self, upstream: GrpcUpstream) -> None:
        """No new calls go to that connection."""
        with suppress(ValueError):
            self._upstreams.remove(upstream)

    def close(self) -> None:
        """Close each connection after its last call."""
        for upstream in list(self._upstreams):
            upstream.close()

    async def stop(self) -> None:
        """Close as `close`, and open no connection any more."""
        self.close()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)

    async def _connect(self) -> None:
        upstream = GrpcUpstream(self, self._context)
        reason = ""
        try:
            if self._address.tls is not None and self._tls is None:
                self._tls = self._address.tls.context("h2")
            await self._address.open(lambda: upstream, self._tls, CONNECT_TIMEOUT_S, self._poller)
        except OSError as error:
            reason = connect_failure(error, CONNECT_TIMEOUT_S)
        except InvalidArgumentError as error:
            reason = error.message
        self._connecting = None
        waiting, self._waiting = self._waiting, []
        if not reason:
            self._upstreams.append(upstream)
        for asking in waiting:
            if reason:
                asking.unreachable(reason)
            elif upstream.has_room:
                asking.connected(upstream)
            else:
                self.connect(asking)
