"""Forwards requests from a front process to the core unchanged: every request except inference."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Any, Protocol

from modelserver.core.tensor import Buffer
from modelserver.protocol.call import GrpcHandler, Method, RpcError, StreamCall, UnaryCall
from modelserver.protocol.exchange import HttpExchange, ResponseWriter
from modelserver.protocol.grpc_status import Status
from modelserver.protocol.kserve import INFER_PATH
from modelserver.protocol.response import HttpResponse
from modelserver.wire.processes.link import Joined, Link, Window
from modelserver.wire.processes.messages import (
    Cancel,
    Content,
    CoreBundle,
    Credit,
    Ended,
    Exchange,
    HalfClose,
    Open,
    Piece,
    Replied,
    Responded,
    Started,
    Unary,
)
from modelserver.wire.processes.setup import MethodCall
from modelserver.wire.processes.short_calls import ShortCalls


class GrpcForwarder:
    """The method table of a front: those that `local` serves itself, and those that are `forwarded` to the core."""

    def __init__(self, local: GrpcHandler, forwarded: Mapping[str, Method], *, short: ShortCalls | None = None) -> None:
        """`short`: the core decodes short calls, too."""
        self._local = local
        own = dict(local.methods)
        if short is not None:
            own[INFER_PATH] = short.grpc(own[INFER_PATH])
        self.methods: Mapping[str, Method] = {**forwarded, **own}

    def drain(self) -> None:
        """Streams of inference end when their requests in flight are answered; the core ends its own."""
        self._local.drain()


class _Call(Protocol):
    """A forwarded request that waits for the core."""

    def receive(self, message: Any) -> None:
        """The core's messages about it, in order."""


class ForwardedCalls:
    """Requests that the core answers as a whole. Event loop thread only."""

    def __init__(self, link: Link[CoreBundle], numbers: count[int]) -> None:
        """`numbers` are those of calls, unique in this process."""
        self.link = link
        self._next_number = numbers.__next__
        self._calls: dict[int, _Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_inflight(self) -> int:
        """Requests that the core has not answered."""
        return len(self._calls)

    def http(self, exchange: HttpExchange) -> None:
        """Forward an HTTP request."""
        number = self._next_number()
        head = exchange.head
        self._calls[number] = _HttpCall(self, number, exchange)
        exchange.on_disconnect = partial(self.cancel, number)
        headers, names, peer = dict(head.headers), dict(head.names), exchange.peer
        self.link.send_with(
            number,
            Joined((exchange.body,)),
            lambda body: Exchange(number, head.method, head.path, head.query, headers, body, peer, names),
        )

    def route(self, exchange: HttpExchange, **_: str) -> None:
        """Forward an HTTP request, as the handler of a route."""
        self.http(exchange)

    def grpc(self, call: MethodCall) -> Method:
        """A method that forwards its calls."""
        group, scope, key = call.needs.parts
        if call.is_stream:
            return Method(stream=partial(self._stream, call.path), group=group, scope=scope, key=key)
        return Method(unary=partial(self._unary, call.path), group=group, scope=scope, key=key)

    def receive(self, message: Any) -> None:
        """The core sent a message about a call."""
        self._calls[message.call].receive(message)

    def cancel(self, number: int) -> None:
        """The client left. The core ends the call with a final message nevertheless."""
        if number in self._calls:
            self.link.send(Cancel(number))

    def end(self, number: int) -> None:
        """The final message has arrived."""
        del self._calls[number]

    def bytes_of(self, content: Content) -> Buffer:
        """Content in the form that a wire sends."""
        data = self.link.view(content)
        return data if isinstance(data, bytes) else data.data

    def start(self, work: Any) -> None:
        """Run a coroutine as a Task that lives until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _unary(self, path: str, call: UnaryCall) -> None:
        number = self._next_number()
        self._calls[number] = _UnaryCall(self, call)
        call.on_cancel = partial(self.cancel, number)
        metadata, deadline_ns, peer = dict(call.metadata), call.deadline_ns, call.peer
        self.link.send_with(
            number, Joined((call.message,)), lambda content: Unary(number, path, metadata, deadline_ns, content, peer)
        )

    async def _stream(self, path: str, call: StreamCall) -> None:
        number = self._next_number()
        stream = _StreamCall(self, number, call)
        self._calls[number] = stream
        self.link.send(Open(number, path, dict(call.metadata), call.deadline_ns))
        await stream.run()


class _HttpCall:
    """An exchange that the core answers, at once or piece by piece."""

    def __init__(self, calls: ForwardedCalls, number: int, exchange: HttpExchange) -> None:
        self._calls = calls
        self._number = number
        self._exchange = exchange
        self._pieces: asyncio.Queue[Content | None] = asyncio.Queue()  # bounded by the window
        self._is_broken_off = False

    def receive(self, message: Responded | Started | Piece | Ended) -> None:
        if isinstance(message, Responded):
            self._calls.end(self._number)
            self._exchange.on_disconnect = None
            body = self._calls.bytes_of(message.body)
            self._exchange.respond(HttpResponse(message.status, message.headers, (body,) if body else ()))
        elif isinstance(message, Started):
            self._calls.start(self._pump(self._exchange.start(message.status, message.headers)))
        elif isinstance(message, Piece):
            self._pieces.put_nowait(message.content)
        else:
            self._calls.end(self._number)
            self._is_broken_off = message.status != Status.OK
            self._pieces.put_nowait(None)

    async def _pump(self, writer: ResponseWriter) -> None:
        try:
            while (content := await self._pieces.get()) is not None:
                await writer.write(self._calls.bytes_of(content))
                self._calls.link.send(Credit(self._number, 1))
            if self._is_broken_off:
                writer.abort()
            else:
                await writer.close()
        except ConnectionError:
            self._calls.cancel(self._number)


class _UnaryCall:
    """A call with one message and one reply."""

    def __init__(self, calls: ForwardedCalls, call: UnaryCall) -> None:
        self._calls = calls
        self._call = call

    def receive(self, message: Replied | Ended) -> None:
        self._calls.end(message.call)
        self._call.on_cancel = None
        if isinstance(message, Replied):
            self._call.reply((self._calls.bytes_of(message.content),))
        else:
            self._call.fail(message.status, message.text, message.retry_ms)


class _StreamCall:
    """A call with messages both ways; its own task sends what the core answers."""

    def __init__(self, calls: ForwardedCalls, number: int, call: StreamCall) -> None:
        self._calls = calls
        self._number = number
        self._call = call
        self._window = Window()
        self._news: asyncio.Queue[Piece | Ended] = asyncio.Queue()  # bounded by the window

    def receive(self, message: Piece | Credit | Ended) -> None:
        if isinstance(message, Credit):
            self._window.grant(message.num_pieces)
            return
        if isinstance(message, Ended):
            self._calls.end(self._number)
            self._window.close()
        self._news.put_nowait(message)

    async def run(self) -> None:
        """Serve the call to its end. Raises RpcError for a status other than OK."""
        reader = asyncio.get_running_loop().create_task(self._read())
        link = self._calls.link
        try:
            while isinstance(message := await self._news.get(), Piece):
                await self._call.send((self._calls.bytes_of(message.content),))
                link.send(Credit(self._number, 1))
            if message.status:
                raise RpcError(message.status, message.text)
        finally:
            self._calls.cancel(self._number)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self) -> None:
        link = self._calls.link
        async for message in self._call.messages:
            await self._window.take()
            link.send_with(self._number, Joined((message,)), partial(Piece, self._number))
        link.send(HalfClose(self._number))
