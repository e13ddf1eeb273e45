"""A streaming gRPC call: a Task per call, a bounded queue of messages in, flow control out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from modelserver.core.tensor import Buffer
from modelserver.frontends.grpc.call import Parts, RpcError, StreamCall
from modelserver.frontends.grpc.status import Status
from modelserver.wire.grpc.compression import belongs_off_loop, compress, decompress, decompress_on_loop
from modelserver.wire.grpc.status import OK_TRAILERS, RESPONSE_HEADERS
from modelserver.wire.http2.frame import pack_u32, window_update
from modelserver.wire.http2.grpc_ending import DEADLINE_TEXT, end_call, internal_error, refuse
from modelserver.wire.http2.hpack import literal
from modelserver.wire.http2.message import PREFIX_BYTES
from modelserver.wire.http2.sender import Outgoing
from modelserver.wire.http2.stream import ABANDONED, ANSWERED, DONE, RUNNING, STREAM_SLOTS, Http2Stream

if TYPE_CHECKING:
    from modelserver.wire.http2.connection import Http2Connection
    from modelserver.wire.http2.route import Route

# Messages that the handler has not taken yet; what comes beyond them is kept as it came, within the window.
_MAX_MESSAGES: Final = 64
# With so many bytes waiting, the window is not widened for one more large message.
_MAX_WAITING_BYTES: Final = 8 * 1024 * 1024
# Bytes waiting to be sent beyond which the handler waits.
_MAX_UNSENT_BYTES: Final = 64 * 1024
# Frames of small messages after which the handler lets others run.
_MAX_UNFLUSHED: Final = 128


class _Arrived:
    """A message that waits for the handler; `credit` is what the client may send more when it is taken."""

    __slots__ = ("credit", "is_compressed", "message")

    def __init__(self, message: Buffer, is_compressed: bool, credit: int) -> None:
        self.message = message
        self.is_compressed = is_compressed
        self.credit = credit


class GrpcStream(Http2Stream):
    """One streaming call from its HEADERS to its trailers; also the iterator that its handler takes messages from.

    The Task runs from the head on. It is cancelled when the client leaves or the deadline passes.
    """

    __slots__ = (
        *STREAM_SLOTS,
        "_arrived",
        "_assembly",
        "_credit",
        "_has_headers",
        "_news",
        "_num_waiting_bytes",
        "_task",
        "_unread",
        "_widened",
        "deadline_ns",
    )

    def __init__(self, connection: Http2Connection, stream_id: int, route: Route) -> None:
        self.connection = connection
        self.id = stream_id
        self.route = route
        self.phase = RUNNING
        self.is_ended = False
        self.num_received = 0
        self.send_window = connection.sender.initial_window
        self.receive_window = connection.initial_window
        self.outgoing: Outgoing | None = None
        self.deadline_ns: int | None = None
        self._assembly = connection.new_assembly()
        self._arrived: deque[_Arrived] = deque()
        self._num_waiting_bytes = 0
        self._unread = bytearray()
        # By how much the window was widened for the message in assembly.
        self._widened = 0
        # What was consumed and is not given back yet.
        self._credit = 0
        self._news: asyncio.Future[None] | None = None
        self._has_headers = False
        if route.timeout_ns is not None:
            self.deadline_ns = time.monotonic_ns() + route.timeout_ns
            connection.context.deadlines.add(self, self.deadline_ns)
        call = StreamCall(self, self.send, route.head.metadata, self.deadline_ns, self.send_now)
        self._task = connection.context.loop.create_task(self._run(call), name=f"grpc-stream-{stream_id}")
        # Not at the end of `_run`: a Task that is cancelled at once does not begin it.
        self._task.add_done_callback(self._settle)

    async def _run(self, call: StreamCall) -> None:
        """The handler, and what its end means to the client."""
        failure: RpcError | None = None
        try:
            await self.route.handle(call)
        except RpcError as error:
            failure = error
        except asyncio.CancelledError:
            if self.is_open:  # not because of the client
                end_call(self, Status.UNAVAILABLE, "the server ended the call", has_headers=self._has_headers)
            raise
        except Exception as error:
            failure = internal_error(error)
        if self.is_open:
            self._end(failure)

    def _settle(self, _task: asyncio.Task[None]) -> None:
        if self.phase == ABANDONED:
            self.phase = DONE
            self.connection.settle_abandoned()

    def _end(self, failure: RpcError | None) -> None:
        self.phase = ANSWERED
        if failure is not None:
            end_call(self, failure.status, failure.message, has_headers=self._has_headers)
            return
        if not self._has_headers:
            self._send_headers()
        self.connection.sender.queue(self, (), OK_TRAILERS)
        self.connection.schedule_flush()

    # What the handler sends.

    async def send(self, parts: Parts) -> None:
        """Send a message; returns when there is room for more. Raises RpcError when the client has left."""
        self._check_open()
        flag = b"\0"
        if self.route.encoding is not None:
            parts, flag = (await self._compressed(parts, self.route.encoding),), b"\1"
            self._check_open()
        self._send(flag, parts)
        outgoing = self.outgoing
        if outgoing is not None and outgoing.num_bytes > _MAX_UNSENT_BYTES:
            outgoing.room = self.connection.context.loop.create_future()
            await outgoing.room
        elif len(self.connection.sender.frames) > _MAX_UNFLUSHED:
            await asyncio.sleep(0)  # let them be written: then it shows whether there is room

    def send_now(self, parts: Parts) -> bool:
        """Send a message if that needs no waiting; returns whether it did."""
        outgoing = self.outgoing
        if (
            not self.is_open
            or self.route.encoding is not None
            or (outgoing is not None and outgoing.num_bytes > _MAX_UNSENT_BYTES)
            or len(self.connection.sender.frames) > _MAX_UNFLUSHED
        ):
            return False
        self._send(b"\0", parts)
        return True

    def _send(self, flag: bytes, parts: Parts) -> None:
        if not self._has_headers:
            self._send_headers()
        self.connection.sender.send_data(self, (flag + pack_u32(sum(map(len, parts))), *parts))
        self.connection.schedule_flush()

    def _check_open(self) -> None:
        if not self.is_open:
            raise RpcError(Status.CANCELLED, "the client has left")

    async def _compressed(self, parts: Parts, encoding: bytes) -> bytes:
        context = self.connection.context
        level = context.limits.grpc_compression
        if belongs_off_loop(sum(map(len, parts))):
            return await context.loop.run_in_executor(None, compress, parts, encoding, level)
        return compress(parts, encoding, level)

    def _send_headers(self) -> None:
        self._has_headers = True
        block = RESPONSE_HEADERS
        if self.route.encoding is not None:
            block += literal(b"grpc-encoding", self.route.encoding)
        self.connection.sender.send_block(self.id, block)

    # What the handler takes.

    def __aiter__(self) -> GrpcStream:
        return self

    async def __anext__(self) -> Buffer:
        while not self._arrived:
            if self.is_ended or not self.is_open:
                if self._assembly.is_begun and self.is_open:
                    raise RpcError(Status.INTERNAL, "a message was cut off: the client ended the stream too early")
                raise StopAsyncIteration
            self._news = self.connection.context.loop.create_future()
            await self._news
        arrived = self._arrived.popleft()
        self._num_waiting_bytes -= len(arrived.message)
        self._give_back(arrived.credit)
        if self._unread and not self._arrived:  # not before: what stays unread is copied each time
            unread, self._unread = self._unread, bytearray()
            self._receive_messages(memoryview(unread))
        self._widen()
        return await self._inflated(arrived.message) if arrived.is_compressed else arrived.message

    async def _inflated(self, message: Buffer) -> bytes:
        """Raises RpcError for data that cannot be decompressed; it ends the call."""
        context, encoding = self.connection.context, self.route.head.encoding
        max_bytes = context.limits.max_message_bytes
        inflated = decompress_on_loop(message, encoding, max_bytes)
        if inflated is None:
            inflated = await context.loop.run_in_executor(None, decompress, message, encoding, max_bytes)
        return inflated

    def _give_back(self, num_bytes: int) -> None:
        """The client may send so much more; it is told when that is worth a frame."""
        self._credit += num_bytes
        if self._credit >= self.connection.initial_window // 4 and not self.is_ended and self.is_open:
            self._add_window(self._credit)
            self._credit = 0

    def _widen(self) -> None:
        """Let all of a message come that is larger than the window, if not too much waits already."""
        missing = self._assembly.num_missing - self.receive_window
        if missing > 0 and self._num_waiting_bytes < _MAX_WAITING_BYTES and not self.is_ended and self.is_open:
            self._widened += missing
            self._add_window(missing)

    def _add_window(self, num_bytes: int) -> None:
        self.receive_window += num_bytes
        self.connection.sender.frames.append(window_update(self.id, num_bytes))
        self.connection.schedule_flush()

    # What the client sends.

    def receive(self, data: memoryview) -> None:
        if self._unread:
            self._unread += data
        else:
            self._receive_messages(data)

    def room(self) -> memoryview | None:
        return self._assembly.room()

    def filled(self, num_bytes: int) -> None:
        try:
            self._assembly.filled(num_bytes)
        except RpcError as error:
            self._break(error)
            return
        if self._assembly.is_complete:
            self._take_message()

    def end(self) -> None:
        self._tell()

    @property
    def is_within_message(self) -> bool:
        return self._assembly.is_begun

    def _receive_messages(self, data: memoryview) -> None:
        try:
            while len(data):
                if len(self._arrived) >= _MAX_MESSAGES:
                    self._unread = bytearray(data)
                    return
                data = data[self._assembly.add(data) :]
                if self._assembly.is_complete:
                    self._take_message()
        except RpcError as error:
            self._break(error)
            return
        self._widen()

    def _take_message(self) -> None:
        assembly = self._assembly
        is_compressed = assembly.is_compressed
        message = assembly.take()
        credit = len(message) + PREFIX_BYTES - self._widened
        self._widened = 0
        self._num_waiting_bytes += len(message)
        self._arrived.append(_Arrived(message, is_compressed, credit))
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    # Ends that are not the handler's.

    def _break(self, error: RpcError) -> None:
        """The client sent what is no message."""
        refuse(self, error, has_headers=self._has_headers)
        self._task.cancel()

    def expire(self) -> None:
        if self.is_open:
            end_call(self, Status.DEADLINE_EXCEEDED, DEADLINE_TEXT, has_headers=self._has_headers)
            self._task.cancel()

    def cancel(self) -> None:
        self._task.cancel()

    def give_up(self, text: str) -> None:
        end_call(self, Status.DEADLINE_EXCEEDED, text, has_headers=self._has_headers)
        self._task.cancel()

    def release(self) -> None:
        if self.deadline_ns is not None:
            self.connection.context.deadlines.remove(self, self.deadline_ns)
        self._assembly.drop()
        self._arrived.clear()
        self._unread = bytearray()
