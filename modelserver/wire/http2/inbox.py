"""The messages of a streaming call between the client and the handler: bounded, and paid for with windows."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Final

from modelserver.core.long_work import long_work
from modelserver.core.tensor import Buffer
from modelserver.protocol.call import RpcError
from modelserver.protocol.grpc_status import Status
from modelserver.wire.http2.frame import window_update
from modelserver.wire.http2.grpc_compression import decompress, decompress_on_loop
from modelserver.wire.http2.message import PREFIX_BYTES
from modelserver.wire.http2.stream import Http2Stream

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
