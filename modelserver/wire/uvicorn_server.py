"""Carries HTTP/1.1 from uvicorn's protocol to any object with `handle(exchange)`.

uvicorn parses and writes; listening, limits and the graceful stop are ours, so that it lives in our event
loop with our signals. One future per request waits for the answer; the frontend needs no Task.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from modelserver.core.tensor import Buffer
from modelserver.errors import UnavailableError
from modelserver.frontends.http.exchange import Frontend, HttpExchange, HttpRequest, HttpResponse, ResponseWriter
from modelserver.frontends.http.status import error_response, message_response
from modelserver.wire.corked_transport import CorkedTransport
from modelserver.wire.http_body import BodyCollector

logger = logging.getLogger(__name__)

_Message = MutableMapping[str, Any]
_Send = Callable[[Any], Awaitable[None]]

_BACKLOG = 2048
_MAX_HEAD_BYTES = 1 << 20  # the parser has no limit of its own
_ABORT_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class UvicornOptions:
    """How to listen. `port_flag` is what an operator changes when the port is taken."""

    reuse_port: bool = False
    max_body_bytes: int = 64 * 1024 * 1024
    port_flag: str = "--http-port"
    # Longer than the usual idle timeout of proxies, so that it is they who close.
    keep_alive_s: int = 65


class UvicornServer:
    """An HTTP listener for one frontend. Everything happens on the event loop that calls `start`."""

    def __init__(self, frontend: Frontend, host: str, port: int, options: UvicornOptions | None = None) -> None:
        self._host = host
        self._port = port
        self._options = options or UvicornOptions()
        self._app = _App(frontend)
        self._state = ServerState()
        self._socket: socket.socket | None = None
        self._listener: asyncio.AbstractServer | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; the real one when 0 was asked for."""
        return self._port

    async def start(self) -> None:
        """Listen. Raises UnavailableError, naming the flag, when the address cannot be had."""
        loop = asyncio.get_running_loop()
        config = self._config()
        config.load()
        bound = _bind(self._host, self._port, self._options)
        self._port = bound.getsockname()[1]

        def connect() -> asyncio.Protocol:
            return _Connection(config, self._state, self._options.max_body_bytes, loop)

        self._listener = await loop.create_server(connect, sock=bound, backlog=_BACKLOG)

    async def stop(self, grace_s: float) -> None:
        """Accept no more, let requests in flight finish for `grace_s`, then cut what is left."""
        if self._listener is None:
            return
        self._listener.close()
        connections = cast("set[_Connection]", self._state.connections)
        for connection in list(connections):
            connection.shutdown()
        if connections:
            await _wait_all([connection.closed for connection in connections], grace_s)
        for connection in list(connections):
            connection.transport.abort()
        if self._state.tasks:
            await _wait_all(list(self._state.tasks), _ABORT_WAIT_S)
        await self._listener.wait_closed()
        self._listener = None

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=self._options.keep_alive_s,
        )


async def _wait_all(futures: list[asyncio.Future[Any]], timeout_s: float) -> None:
    await asyncio.wait(futures, timeout=timeout_s)


def _bind(host: str, port: int, options: UvicornOptions) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if options.reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port with {options.port_flag}"
        ) from error
    bound.setblocking(False)
    return bound


class _Connection(HttpToolsProtocol):
    """A connection that collects bodies itself, and says when it is gone, to the request in progress and to `stop`."""

    transport: CorkedTransport  # type: ignore[assignment]  # it stands for an asyncio.Transport

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        max_body_bytes: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, {}, loop)
        self.closed: asyncio.Future[None] = loop.create_future()
        self.on_lost: Callable[[], None] | None = None
        # Bytes received since a request line began; None while no header section is open.
        self._head_bytes: int | None = None
        self._max_body_bytes = max_body_bytes
        self._body: BodyCollector  # of the request that is being received

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, CorkedTransport(transport)))

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse(431, f"the request line and headers are over the limit of {_MAX_HEAD_BYTES} bytes")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        length = headers.get("content-length")
        content_length = int(length) if length is not None else None
        self._body = BodyCollector(content_length, _header_length(headers), self._max_body_bytes)
        # uvicorn hands the scope to the app: its way back to what arrives here.
        self.scope["modelserver"] = (self, headers, self._body)  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        # Instead of uvicorn's, which would copy each piece twice.
        self._body.add(body)
        if self._body.error is not None:
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._body.finish()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what never became a request, and close."""
        (body,) = message_response(status, message).body
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + bytes(body))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.closed.done():
            self.closed.set_result(None)
        if self.on_lost is not None:
            self.on_lost()


class _App:
    """The ASGI application: waits for the body and for the frontend's answer, and writes it."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def __call__(self, scope: _Message, receive: Callable[[], Awaitable[Any]], send: _Send) -> None:
        connection: _Connection
        body: BodyCollector
        connection, headers, body = scope["modelserver"]
        while not body.is_complete and body.error is None:
            if (await receive())["type"] == "http.disconnect":
                return
        if body.error is None:
            query = scope["query_string"].decode("latin-1")
            request = HttpRequest(scope["method"], scope["path"], headers, body.body(), query)
            await _Call(connection, send).run(self._frontend, request)
            return
        # The connection stays open and the rest of the body is dropped as it comes: a client that
        # sends all of it before it reads gets the answer and not a reset. One that asked first may not
        # send it at all, and then nobody knows where its next request begins.
        response = error_response(body.error)
        if "expect" in headers:
            response.headers.append(("Connection", "close"))
        await _write(response, send, connection.transport)


def _header_length(headers: dict[str, str]) -> int:
    """Where an infer request's tensors begin; only a hint, the frontend checks it."""
    text = headers.get("inference-header-content-length", "")
    return int(text) if text.isdecimal() and len(text) < 19 else 0


class _Call(ResponseWriter):
    """One request's way back: a future for the answer, and the writer of an answer in pieces."""

    __slots__ = ("_connection", "_done", "_head", "_send")

    def __init__(self, connection: _Connection, send: _Send) -> None:
        self._connection = connection
        self._send = send
        # The complete answer, or None when it was written in pieces or the client left.
        self._done: asyncio.Future[HttpResponse | None] = connection.loop.create_future()
        self._head: _Message | None = None  # of an answer in pieces, until it is sent

    async def run(self, frontend: Frontend, request: HttpRequest) -> None:
        exchange = HttpExchange(request, self._respond, self._start)
        frontend.handle(exchange)
        # The exchange refers to this object and must not be referred to by it: a cycle would keep every
        # body in memory until the garbage collector comes by.
        self._connection.on_lost = partial(self._lost, exchange)
        response = await self._done
        self._connection.on_lost = None
        if response is not None:
            await _write(response, self._send, self._connection.transport)

    def _lost(self, exchange: HttpExchange) -> None:
        self._respond(None)
        if exchange.on_disconnect is not None:
            exchange.on_disconnect()

    def _respond(self, response: HttpResponse | None) -> None:
        if not self._done.done():  # else the client has left
            self._done.set_result(response)

    def _start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        self._head = _head(status, headers)
        return self

    async def write(self, data: Buffer) -> None:
        if self._done.done():
            raise ConnectionResetError("the client has left")
        await self._send_head()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        if self._done.done():
            return
        await self._send_head()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        self._respond(None)

    async def _send_head(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            await self._send(head)


def _head(status: int, headers: list[tuple[str, str]]) -> _Message:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def _write(response: HttpResponse, send: _Send, transport: CorkedTransport) -> None:
    head = _head(response.status, response.headers)
    head["headers"].append((b"content-length", b"%d" % sum(map(len, response.body))))
    body = response.body or (b"",)
    last = len(body) - 1
    with transport.corked():
        await send(head)
        for index, buffer in enumerate(body):
            await send({"type": "http.response.body", "body": buffer, "more_body": index < last})
