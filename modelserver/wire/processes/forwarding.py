"""The frontends of a front process: inference is decoded here, every other request goes to the core as it is.

A frontend itself knows nothing of this: what runs here are its handlers for inference, over a `RemoteDataPlane`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from modelserver.auth.access import Admitted
from modelserver.auth.api_keys import KeyRing
from modelserver.core.tensor import Buffer
from modelserver.frontends.grpc.access_log import with_access_log
from modelserver.protocol.call import Frontend as GrpcFrontend
from modelserver.protocol.call import Method, RpcError, StreamCall, UnaryCall
from modelserver.protocol.exchange import Frontend as HttpFrontend
from modelserver.protocol.exchange import HttpExchange, HttpHead, HttpResponse, ResponseWriter
from modelserver.protocol.kserve import ASKING_HEADER, INFER_PATH, SERVICE
from modelserver.protocol.response import ErrorWriter
from modelserver.wire.processes.link import Link
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
from modelserver.wire.processes.short_calls import ShortCalls
from modelserver.wire.processes.window import Window

# What a front serves itself; it needs nothing of the core but inference.
_LOCAL_SERVICES = ("/grpc.reflection.",)
_LOCAL_METHODS = frozenset({INFER_PATH, f"/{SERVICE}/ModelStreamInfer"})
_RAW_HEADER = "inference-header-content-length"


class HttpForwarder(HttpFrontend):
    """Lets `local` decode and answer inference, and the core the rest."""

    def __init__(self, local: HttpFrontend, calls: ForwardedCalls) -> None:
        self._local = local
        self._calls = calls

    def handle(self, exchange: HttpExchange) -> None:
        """Answer `exchange`, now or later; never raises."""
        head = exchange.head
        # Only the local frontend leaves a memo: it was asked with this very head before.
        if head.memo is not None or (_is_inference(head) and not _needs_model(head.headers)):
            self._local.handle(exchange)
        else:
            self._calls.http(exchange)

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        """Of every request, also of those that the core answers: their bodies come here."""
        return self._local.check_head(head, peer)

    def errors(self, path: str) -> ErrorWriter:
        return self._local.errors(path)


def _is_inference(head: HttpHead) -> bool:
    """Whether the path can only be that of inference, as no other route for POST ends so. GET asks for a model."""
    return head.method == "POST" and head.path.endswith(("/infer", "/infer/"))


def _needs_model(headers: Mapping[str, str]) -> bool:
    """Whether the model itself has a say, which the core has.

    Its config describes a body that is a single tensor, and decides whether an answer is a stream of events; how busy
    it is may be asked for.
    """
    text = headers.get(_RAW_HEADER)
    is_raw = text is not None and not text.strip("0")
    return is_raw or ASKING_HEADER in headers or "text/event-stream" in headers.get("accept", "")


class GrpcForwarder:
    """The method table of a front: those of `local` that it can serve itself, and the core behind the others."""

    def __init__(
        self,
        local: GrpcFrontend,
        calls: ForwardedCalls,
        *,
        short: ShortCalls | None = None,
        is_logged: bool = False,
        keys: KeyRing | None = None,
    ) -> None:
        """`short`: the core decodes short calls, too.

        `local` writes its own lines of the access log; `is_logged`: forwarded calls have some too.
        """
        self._local = local
        own = dict(local.methods)
        if short is not None:
            own[INFER_PATH] = short.grpc(own[INFER_PATH])
        forwarded = {path: calls.grpc(path, method) for path, method in local.methods.items() if not _is_local(path)}
        logged = with_access_log(forwarded, is_logged=is_logged, keys=keys)
        # Messages come here, also those that the core answers: `local` looks at their heads.
        checked = {path: replace(method, check_head=own[path].check_head) for path, method in logged.items()}
        self.methods: Mapping[str, Method] = {**own, **checked}

    def drain(self) -> None:
        """Streams of inference end when what is in flight is answered; the core ends its own."""
        self._local.drain()


def _is_local(path: str) -> bool:
    return path in _LOCAL_METHODS or path.startswith(_LOCAL_SERVICES)


class _Call(Protocol):
    """A forwarded request that waits for the core."""

    def receive(self, message: Any) -> None:
        """What the core says about it, in order."""


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
        body = self.link.content(exchange.body)
        headers, names = dict(head.headers), dict(head.names)
        self.link.send(Exchange(number, head.method, head.path, head.query, headers, body, exchange.peer, names))

    def grpc(self, path: str, method: Method) -> Method:
        """A method of the same kind that forwards its calls."""
        if method.unary is not None:
            return Method(unary=partial(self._unary, path))
        return Method(stream=partial(self._stream, path))

    def receive(self, message: Any) -> None:
        """The core says something about a call."""
        self._calls[message.call].receive(message)

    def cancel(self, number: int) -> None:
        """The client left. The core ends the call with a final message nevertheless."""
        if number in self._calls:
            self.link.send(Cancel(number))

    def end(self, number: int) -> None:
        """The final message has come."""
        del self._calls[number]

    def bytes_of(self, content: Content) -> Buffer:
        """Content as what a wire sends."""
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
        content = self.link.content(call.message)
        self.link.send(Unary(number, path, dict(call.metadata), call.deadline_ns, content, call.peer))

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
            self._pieces.put_nowait(None)

    async def _pump(self, writer: ResponseWriter) -> None:
        try:
            while (content := await self._pieces.get()) is not None:
                await writer.write(self._calls.bytes_of(content))
                self._calls.link.send(Credit(self._number, 1))
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
            link.send(Piece(self._number, link.content(message)))
        link.send(HalfClose(self._number))
