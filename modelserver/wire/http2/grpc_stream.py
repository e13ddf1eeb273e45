"""A streaming gRPC call: a Task per call, a bounded queue of messages in, flow control out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial
from typing import Final

from modelserver.core.long_work import long_work
from modelserver.core.tensor import Buffer
from modelserver.protocol.call import Parts, RpcError, StreamCall
from modelserver.protocol.grpc_status import Status
from modelserver.wire.address import peer_of
from modelserver.wire.http2.deadlines import Expiring
from modelserver.wire.http2.frame import pack_u32, window_update
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
from modelserver.wire.http2.message import PREFIX_BYTES, BudgetSpentError
from modelserver.wire.http2.sender import Outgoing
from modelserver.wire.http2.stream import (
    ABANDONED,
    ANSWERED,
    DONE,
    RUNNING,
    STREAM_SLOTS,
    Connection,
    Http2Stream,
    Route,
)

# Bytes waiting to be sent beyond which the handler waits.
_MAX_UNSENT_BYTES: Final = 64 * 1024
# Frames of small messages after which the handler lets others run.
_MAX_UNFLUSHED: Final = 128


class GrpcStream(Http2Stream, Expiring):
    """One streaming call from its HEADERS to its trailers.

    The Task runs from the head on. It is cancelled when the client leaves or the deadline passes.
    """

    __slots__ = (
        *STREAM_SLOTS,
        "_has_headers",
        "_inbox",
        "_task",
        "deadline_ns",
    )

    def __init__(self, connection: Connection, stream_id: int, route: Route) -> None:
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
        self._inbox = Inbox(self)
        self._has_headers = False
        if route.timeout_ns is not None:
            self.deadline_ns = time.monotonic_ns() + route.timeout_ns
            connection.context.deadlines.add(self, self.deadline_ns)
        peer = peer_of(connection.transport)
        call = StreamCall(self._inbox, self.send, route.head.metadata, self.deadline_ns, self.send_now, peer)
        self._task = connection.context.loop.create_task(self._run(call), name=f"grpc-stream-{stream_id}")
        # Not at the end of `_run`: a Task that is cancelled at once does not begin it.
        self._task.add_done_callback(self._settle)

    async def _run(self, call: StreamCall) -> None:
        """Run the handler, and end the call for the client as the handler ends."""
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
        self.connection.queue(self, (), OK_TRAILERS)
        self.connection.schedule_flush()

    # Messages from the handler.

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
        """Send a message if possible without waiting; returns whether it did."""
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
        message = (flag + pack_u32(sum(map(len, parts))), *parts)
        if not self.connection.sender.send_data(self, message):
            self.connection.queue(self, message)
        self.connection.schedule_flush()

    def _check_open(self) -> None:
        if not self.is_open:
            raise RpcError(Status.CANCELLED, "the client has left")

    async def _compressed(self, parts: Parts, encoding: bytes) -> bytes:
        context = self.connection.context
        level = context.limits.grpc_compression
        if belongs_off_loop(sum(map(len, parts))):
            return await long_work().compute(partial(compress, parts, encoding, level))
        return compress(parts, encoding, level)

    def _send_headers(self) -> None:
        self._has_headers = True
        block = RESPONSE_HEADERS
        if self.route.encoding is not None:
            block += literal(b"grpc-encoding", self.route.encoding)
        self.connection.sender.send_block(self.id, block)

    # Messages from the client.

    def receive(self, data: memoryview) -> None:
        try:
            self._inbox.add(data)
        except RpcError as error:
            self._break(error)

    def room(self) -> memoryview | None:
        return self._inbox.room()

    def filled(self, num_bytes: int) -> None:
        try:
            self._inbox.filled(num_bytes)
        except RpcError as error:
            self._break(error)

    def end(self) -> None:
        self._inbox.tell()

    @property
    def is_within_message(self) -> bool:
        return self._inbox.is_within_message

    @property
    def awaits_body(self) -> bool:
        return not self.is_ended and self.is_open and self._inbox.awaits_rest

    # Ends that the handler did not cause.

    def tell_short(self) -> None:
        if self.is_open:
            self._break(BudgetSpentError())

    def _break(self, error: RpcError) -> None:
        """The client sent an invalid message."""
        refuse(self, error, has_headers=self._has_headers)
        self._task.cancel()

    def expire(self) -> None:
        if self.is_open:
            end_call(self, Status.DEADLINE_EXCEEDED, DEADLINE_TEXT, has_headers=self._has_headers)
            self._task.cancel()

    def dismiss(self, text: str) -> None:
        if self.phase != ANSWERED:
            end_call(self, Status.UNAVAILABLE, text, has_headers=self._has_headers)
            self._task.cancel()

    def cancel(self) -> None:
        self._task.cancel()

    def give_up(self, text: str) -> None:
        end_call(self, Status.DEADLINE_EXCEEDED, text, has_headers=self._has_headers)
        self._task.cancel()

    def release(self) -> None:
        if self.deadline_ns is not None:
            self.connection.context.deadlines.remove(self, self.deadline_ns)
        self._inbox.drop()


# The most messages waiting for the handler; bytes beyond them are kept undecoded, within the window.
_MAX_MESSAGES: Final = 64
# With this many bytes waiting, the window is not widened for another large message.
_MAX_WAITING_BYTES: Final = 8 * 1024 * 1024


class _Arrived:
    """A message that waits for the handler; `credit` is the window that the client gets back when it is taken."""

    __slots__ = ("credit", "is_compressed", "message")

    def __init__(self, message: Buffer, is_compressed: bool, credit: int) -> None:
        self.message = message
        self.is_compressed = is_compressed
        self.credit = credit


class Inbox:
    """The iterator from which the handler of one stream takes messages; the stream puts bytes in.

    The window of the stream is given back as messages are taken, so that a client sends no faster than its
    handler works.
    """

    __slots__ = ("_arrived", "_assembly", "_credit", "_news", "_num_waiting_bytes", "_stream", "_unread", "_widened")

    def __init__(self, stream: Http2Stream) -> None:
        self._stream = stream
        self._assembly = stream.connection.new_assembly(stream.route.admitted)
        self._assembly.on_given_up = stream.give_up_soon
        self._arrived: deque[_Arrived] = deque()
        self._num_waiting_bytes = 0
        self._unread = bytearray()
        # By how much the window was widened for the message in assembly.
        self._widened = 0
        # Bytes taken and not yet returned to the window.
        self._credit = 0
        self._news: asyncio.Future[None] | None = None

    # For the handler.

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> Buffer:
        """The next message. Raises RpcError, which ends the call, for an invalid one."""
        if self._unread and not self._arrived:  # not before: unread bytes are copied each time
            unread, self._unread = self._unread, bytearray()
            self._read(memoryview(unread))
        while not self._arrived:
            self._check_end()
            self._news = self._stream.connection.context.loop.create_future()
            await self._news
        arrived = self._arrived.popleft()
        self._num_waiting_bytes -= len(arrived.message)
        self._give_back(arrived.credit)
        self._widen()
        return await self._inflated(arrived.message) if arrived.is_compressed else arrived.message

    def _check_end(self) -> None:
        if not self._stream.is_open:
            raise StopAsyncIteration
        if self._stream.is_ended:
            if self._assembly.is_begun:
                raise RpcError(Status.INTERNAL, "a message was cut off: the client ended the stream too early")
            raise StopAsyncIteration

    async def _inflated(self, message: Buffer) -> Buffer:
        context, encoding = self._stream.connection.context, self._stream.route.head.encoding
        max_bytes = context.limits.max_message_bytes
        inflated = decompress_on_loop(message, encoding, max_bytes)
        if inflated is None:
            inflated = await long_work().compute(partial(decompress, message, encoding, max_bytes))
        return inflated

    # For the stream.

    def add(self, data: memoryview) -> None:
        """Bytes from the client. Raises RpcError for an invalid message."""
        if self._unread:
            self._unread += data
        else:
            self._read(data)

    def room(self) -> memoryview | None:
        """Memory of a large message that is being received."""
        return self._assembly.room()

    def filled(self, num_bytes: int) -> None:
        """This many bytes were received into `room`. Raises RpcError when there is no memory for them."""
        self._assembly.filled(num_bytes)
        if self._assembly.is_complete:
            self._take()

    def tell(self) -> None:
        """Wake the handler: there is a message, or the end."""
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    @property
    def is_within_message(self) -> bool:
        """Whether a part of a message has arrived."""
        return self._assembly.is_begun

    @property
    def awaits_rest(self) -> bool:
        """Whether the client can send the rest of a message: its window covers all of it."""
        return self._assembly.is_begun and self._assembly.num_missing <= self._stream.receive_window

    def drop(self) -> None:
        """The handler takes no more messages."""
        self._assembly.drop()
        self._arrived.clear()
        self._unread.clear()

    def _read(self, data: memoryview) -> None:
        while len(data):
            if len(self._arrived) >= _MAX_MESSAGES:
                self._unread = bytearray(data)
                return
            data = data[self._assembly.add(data) :]
            if self._assembly.is_complete:
                self._take()
        self._widen()

    def _take(self) -> None:
        """The message in assembly is complete."""
        assembly = self._assembly
        is_compressed = assembly.is_compressed
        message = assembly.take()
        # Less than nothing if the window was widened by more than the message needed; the next one makes up for it.
        credit = len(message) + PREFIX_BYTES - self._widened
        self._widened = 0
        self._num_waiting_bytes += len(message)
        self._arrived.append(_Arrived(message, is_compressed, credit))
        self.tell()

    # The stream's window.

    def _give_back(self, num_bytes: int) -> None:
        """Return this much to the window; a frame tells the client once it is worth one."""
        self._credit += num_bytes
        if self._credit >= self._stream.connection.initial_window // 4:
            self._add_window(self._credit)
            self._credit = 0

    def _widen(self) -> None:
        """Admit all of a message that is larger than the window, unless too much waits already."""
        missing = self._assembly.num_missing - self._stream.receive_window
        if missing > 0 and self._num_waiting_bytes < _MAX_WAITING_BYTES:
            self._widened += missing
            self._add_window(missing)

    def _add_window(self, num_bytes: int) -> None:
        stream = self._stream
        if stream.is_ended or not stream.is_open:
            return
        stream.receive_window += num_bytes
        stream.connection.sender.frames.append(window_update(stream.id, num_bytes))
        stream.connection.schedule_flush()
