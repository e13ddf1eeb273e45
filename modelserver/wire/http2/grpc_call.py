"""A unary gRPC call: the stream is the call that the handler answers."""

from __future__ import annotations

import asyncio
import struct
import time
from functools import partial
from typing import Final

from modelserver.core import accelerator
from modelserver.core.long_work import long_work
from modelserver.core.tensor import Buffer
from modelserver.protocol.call import Metadata, Parts, RpcError, UnaryCall
from modelserver.protocol.grpc_status import Status
from modelserver.wire.address import peer_of
from modelserver.wire.http2.deadlines import Expiring
from modelserver.wire.http2.frame import DATA, END_HEADERS, END_STREAM, HEADERS, ErrorCode, pack_u32, window_update
from modelserver.wire.http2.grpc_compression import belongs_off_loop, compress, decompress, decompress_on_loop
from modelserver.wire.http2.grpc_ending import (
    DEADLINE_TEXT,
    OK_TRAILERS,
    RESPONSE_HEADERS,
    end_call,
    internal_error,
    refuse,
)
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.message import PREFIX_BYTES, BudgetSpentError, MessageAssembly
from modelserver.wire.http2.stream import (
    ABANDONED,
    ANSWERED,
    DONE,
    FRESH,
    RECEIVING,
    RUNNING,
    STREAM_SLOTS,
    Connection,
    Http2Stream,
    Route,
)

# The frames of a small answer, but for the ids and the message: they are the same each time.
_HEADERS_HEAD: Final = len(RESPONSE_HEADERS).to_bytes(3, "big") + bytes((HEADERS, END_HEADERS))
_TRAILERS_HEAD: Final = len(OK_TRAILERS).to_bytes(3, "big") + bytes((HEADERS, END_HEADERS | END_STREAM))
# The same as whole frames, of stream 0.
_HEADERS_FRAME: Final = _HEADERS_HEAD + bytes(4) + RESPONSE_HEADERS
_TRAILERS_FRAME: Final = _TRAILERS_HEAD + bytes(4) + OK_TRAILERS
# Head of a DATA frame and the prefix of the message in it.
_pack_data: Final = struct.Struct(">HBBBIBI").pack


class GrpcCall(UnaryCall, Http2Stream, Expiring):
    """One unary call, from its HEADERS to its trailers.

    The message is handed over when the client has ended the stream, because only then it is known to be the only one.
    """

    __slots__ = (*STREAM_SLOTS, "_assembly")

    def __init__(self, connection: Connection, stream_id: int, route: Route) -> None:
        self.connection = connection
        self.id = stream_id
        self.route = route
        self.phase = FRESH
        self.is_ended = False
        self.num_received = 0
        self.send_window = connection.sender.initial_window
        self.receive_window = connection.initial_window
        self.outgoing = None
        self.on_cancel = None
        self._assembly: MessageAssembly | None = None
        if route.timeout_ns is None:
            self.deadline_ns = None
        else:
            self.deadline_ns = deadline_ns = time.monotonic_ns() + route.timeout_ns
            connection.context.deadlines.add(self, deadline_ns)

    @property
    def metadata(self) -> Metadata:  # type: ignore[override] # never set: read when asked for
        return self.route.head.metadata

    @property
    def peer(self) -> str:
        return peer_of(self.connection.transport)

    # The answer.

    def reply(self, parts: Parts) -> None:
        if self.phase != RUNNING:
            self._come_late()
            return
        connection = self.connection
        sender = connection.sender
        size = sum(map(len, parts))
        length = size + PREFIX_BYTES
        if length > sender.inline_bytes or length > sender.window or length > self.send_window:
            self._queue(b"\0", parts, RESPONSE_HEADERS)
            return
        # A small answer that can be sent at once, as most can: three frames in one piece.
        sender.window -= length
        stream_id = self.id
        frames = None
        if accelerator.join_answer is not None and type(parts) is tuple:
            frames = accelerator.join_answer(stream_id, parts, _HEADERS_FRAME, _TRAILERS_FRAME)
        if frames is None:
            frames = _join_answer(stream_id, parts, size)
        sender.frames.append(frames)
        # As `Connection.finish` for a stream that both sides have ended.
        self.phase = DONE
        self.on_cancel = None
        del connection.streams[stream_id]
        connection.closed.ended.append(stream_id)
        if self.deadline_ns is not None:
            connection.context.deadlines.remove(self, self.deadline_ns)
        if not connection.is_flush_due:
            connection.schedule_flush()

    def fail(self, status: int, text: str, retry_ms: int = 0) -> None:
        if self.phase != RUNNING:
            self._come_late()
            return
        self.phase = ANSWERED
        self.on_cancel = None
        end_call(self, status, text, retry_ms=retry_ms)

    def _queue(self, flag: bytes, parts: Parts, headers: bytes) -> None:
        """An answer that is large, or must wait for a window."""
        self.phase = ANSWERED
        self.on_cancel = None
        connection = self.connection
        connection.sender.send_block(self.id, headers)
        prefix = flag + pack_u32(sum(map(len, parts)))
        connection.queue(self, (prefix, *parts), OK_TRAILERS)
        connection.schedule_flush()

    def _come_late(self) -> None:
        """The answer to a call that was closed meanwhile."""
        if self.phase == ABANDONED:
            self.phase = DONE
            self.connection.settle_abandoned()

    # The request, unless it is one whole message in one frame, which the frame loop handles.

    def receive(self, data: memoryview) -> None:
        assembly = self._assembly
        if assembly is None:
            self.phase = RECEIVING
            route = self.route
            if route.check_head is not None:
                # The head may have been remembered for long: its key may have been revoked.
                try:
                    route.check_head(route.head.metadata, self.peer)
                except RpcError as error:
                    refuse(self, error)
                    return
            assembly = self._assembly = self.connection.new_assembly(route.admitted)
            assembly.on_given_up = self.give_up_soon
        try:
            num_taken = assembly.add(data)
        except RpcError as error:
            refuse(self, error)
            return
        if num_taken < len(data):
            refuse(self, RpcError(Status.UNIMPLEMENTED, "a unary call has exactly one request message, got more"))
            return
        self._widen(assembly)

    def room(self) -> memoryview | None:
        return self._assembly.room() if self._assembly is not None else None

    def filled(self, num_bytes: int) -> None:
        assert self._assembly is not None, "only a call with an assembly has room"
        try:
            self._assembly.filled(num_bytes)
        except RpcError as error:
            refuse(self, error)

    def end(self) -> None:
        assembly = self._assembly
        if assembly is None or not assembly.is_complete:
            refuse(self, _incomplete(assembly))
            return
        is_compressed = assembly.is_compressed
        message = assembly.take()
        assembly.on_given_up = None  # it refers to this call
        if is_compressed:
            self._inflate(message)
        else:
            self._run(message)

    @property
    def is_within_message(self) -> bool:
        return self._assembly is None or not self._assembly.is_complete

    def _widen(self, assembly: MessageAssembly) -> None:
        """Admit all of a message that is larger than the window: other limits bound its memory."""
        increment = assembly.num_missing - self.receive_window
        if increment > 0 and not self.is_ended:
            self.receive_window += increment
            self.connection.sender.frames.append(window_update(self.id, increment))

    def _run(self, message: Buffer) -> None:
        self.message = message
        self.phase = RUNNING
        try:
            self.route.handle(self)
        except Exception as error:
            self.fall(error)

    def fall(self, error: Exception) -> None:
        """The handler raised, which it should not: only this call fails."""
        failure = internal_error(error)
        if self.phase == RUNNING:
            self.fail(failure.status, failure.message)

    def _inflate(self, message: Buffer) -> None:
        connection, encoding = self.connection, self.route.head.encoding
        max_bytes = connection.context.limits.max_message_bytes
        try:
            inflated = decompress_on_loop(message, encoding, max_bytes)
        except RpcError as error:
            refuse(self, error)
            return
        if inflated is not None:
            self._run(inflated)
            return
        job = long_work().compute(partial(decompress, message, encoding, max_bytes))
        job.add_done_callback(self._take_inflated)

    def _take_inflated(self, job: asyncio.Future[Buffer]) -> None:
        error = job.exception()
        if not self.is_open:
            return
        if error is None:
            self._run(job.result())
        elif isinstance(error, RpcError):
            refuse(self, error)
        else:
            refuse(self, internal_error(error))

    # Ends that are not answers.

    def tell_short(self) -> None:
        if self.is_open and self.phase == RECEIVING:
            refuse(self, BudgetSpentError())

    def expire(self) -> None:
        if self.phase == ANSWERED:  # and the client does not take the answer
            self.connection.reset(self, ErrorCode.CANCEL)
        else:
            self._end_early(Status.DEADLINE_EXCEEDED, DEADLINE_TEXT)

    def dismiss(self, text: str) -> None:
        if self.phase != ANSWERED:
            self._end_early(Status.UNAVAILABLE, text)

    def _end_early(self, status: int, text: str) -> None:
        if not self.is_open:
            return
        was_running = self.phase == RUNNING
        end_call(self, status, text)
        if was_running:
            self.cancel()

    def cancel(self) -> None:
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()

    def give_up(self, text: str) -> None:
        end_call(self, Status.DEADLINE_EXCEEDED, text)

    def release(self) -> None:
        if self.deadline_ns is not None:
            self.connection.context.deadlines.remove(self, self.deadline_ns)
        if self._assembly is not None:
            self._assembly.on_given_up = None
            self._assembly.drop()


class CompressingCall(GrpcCall):
    """A unary call with compressed answers: the client accepts them and the server is configured to compress."""

    __slots__ = ()

    def reply(self, parts: Parts) -> None:
        if self.phase != RUNNING:
            self._come_late()
            return
        encoding = self.route.encoding
        assert encoding is not None, "this route compresses"
        level = self.connection.context.limits.grpc_compression
        if not belongs_off_loop(sum(map(len, parts))):
            self._send_compressed(compress(parts, encoding, level))
            return
        job = long_work().compute(partial(compress, parts, encoding, level))
        job.add_done_callback(self._take_compressed)

    def _take_compressed(self, job: asyncio.Future[bytes]) -> None:
        if self.phase != RUNNING:
            self._come_late()
        elif (error := job.exception()) is not None:
            self.fall(error if isinstance(error, Exception) else RuntimeError("compression failed"))
        else:
            self._send_compressed(job.result())

    def _send_compressed(self, message: bytes) -> None:
        assert self.route.encoding is not None, "this route compresses"
        headers = RESPONSE_HEADERS + literal(b"grpc-encoding", self.route.encoding)
        self._queue(b"\1", (message,), headers)


def _join_answer(stream_id: int, parts: Parts, size: int) -> bytes:
    """The frames of an answer whose message has that many bytes."""
    length = size + PREFIX_BYTES
    id_bytes = pack_u32(stream_id)
    data_head = _pack_data(length >> 8, length & 0xFF, DATA, 0, stream_id, 0, size)
    trailers = (_TRAILERS_HEAD, id_bytes, OK_TRAILERS)
    return b"".join((_HEADERS_HEAD, id_bytes, RESPONSE_HEADERS, data_head, *parts, *trailers))


def _incomplete(assembly: MessageAssembly | None) -> RpcError:
    if assembly is None or not assembly.is_begun:
        return RpcError(Status.UNIMPLEMENTED, "a unary call has exactly one request message, got none")
    return RpcError(Status.INTERNAL, "the request message was cut off: the client ended the stream too early")
