"""The reference for our own HTTP wire (`--wire=grpcio`): carries HTTP/1.1 from uvicorn's protocol to a frontend.

uvicorn parses and writes; listening, limits and the graceful stop are ours, so that it lives in our event
loop with our signals. One future per request waits for the answer; the frontend needs no Task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from modelserver.core.tensor import Buffer
from modelserver.protocol.exchange import HttpExchange, HttpHandler, HttpHead, ResponseWriter
from modelserver.protocol.response import HttpResponse, message_response
from modelserver.wire.address import Address, peer_of
from modelserver.wire.body import BodyCollector
from modelserver.wire.context import DISMISSAL, FIRST_WORDS_S
from modelserver.wire.http1.head import content_length, json_length
from modelserver.wire.limits import WireLimits

_Message = MutableMapping[str, Any]
_Send = Callable[[Any], Awaitable[None]]

_BACKLOG = 2048
_ABORT_WAIT_S = 1.0
_TASKS_WAIT_S = 1.0
# For what was given up, to be told so.
_LAST_WORDS_S = 1.0
_CLOSE = ("Connection", "close")


class UvicornServer:
    """An HTTP listener for one frontend. Everything happens on the event loop that calls `start`."""

    def __init__(self, frontend: HttpHandler, address: Address, limits: WireLimits | None = None) -> None:
        self._address = address
        self._limits = limits or WireLimits()
        self._app = _App(frontend)
        self._state = ServerState()
        self._listener: asyncio.AbstractServer | None = None

    @property
    def port(self) -> int:
        """The port that is listened on; the real one when 0 was asked for."""
        return self._address.port

    async def start(self) -> None:
        """Listen. Raises UnavailableError, naming the flag, when the address cannot be had."""
        loop = asyncio.get_running_loop()
        config = self._config()
        config.load()
        bound = self._address.bind()
        self._address = replace(self._address, port=bound.getsockname()[1])
        self._listener = await loop.create_server(
            lambda: _Connection(config, self._state, self._limits, loop), sock=bound, backlog=_BACKLOG
        )

    def retire(self) -> None:
        """Make each answer the last of its connection."""
        self._app.is_retiring = True

    async def stop(self, grace_s: float) -> None:
        """Accept no more, let requests in flight finish for `grace_s`, then tell the rest that it will not."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.close()
        self.retire()
        connections = cast("set[_Connection]", self._state.connections)
        for connection in list(connections):
            connection.shutdown()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=grace_s)
        if connections:
            for connection in list(connections):
                connection.dismiss()
            await asyncio.wait([connection.closed for connection in connections], timeout=_LAST_WORDS_S)
        left = list(connections)
        for connection in left:
            connection.abort()
        if left:
            await asyncio.wait([connection.closed for connection in left], timeout=_ABORT_WAIT_S)
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=_TASKS_WAIT_S)
        await listener.wait_closed()

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
            timeout_keep_alive=int(self._limits.times.http1_idle_s),
        )


class _Connection(HttpToolsProtocol):
    """A connection that collects bodies itself, and says when it is gone, to the request in progress and to `stop`."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        limits: WireLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, {}, loop)
        self.closed: asyncio.Future[None] = loop.create_future()
        self.exchange: _Exchange | None = None  # that is not answered
        # Bytes received since a request line began; None while no header section is open.
        self._head_bytes: int | None = None
        self._max_head_bytes = limits.head.max_http1_bytes
        self._max_body_bytes = limits.max_body_bytes
        self._body: BodyCollector  # of the request that is being received

    def data_received(self, data: bytes) -> None:
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self._max_head_bytes:
                self._refuse(431, f"the request line and headers are over the limit of {self._max_head_bytes} bytes")
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        self._body = BodyCollector(content_length(headers), json_length(headers), self._max_body_bytes)
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

    def shutdown(self) -> None:
        """Close behind the answer that is due; without one, a request may be on its way."""
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(FIRST_WORDS_S, super().shutdown)
        else:
            super().shutdown()

    def dismiss(self) -> None:
        """Answer what is not answered with the news that it will not be."""
        if self.exchange is None:
            self.abort()
        else:
            self.exchange.dismiss()

    def abort(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.closed.done():
            self.closed.set_result(None)
        if self.exchange is not None:
            self.exchange.lost()


class _App:
    """The ASGI application: waits for the body and for the frontend's answer, and writes it."""

    def __init__(self, frontend: HttpHandler) -> None:
        self.frontend = frontend
        self.is_retiring = False

    async def __call__(self, scope: _Message, receive: Callable[[], Awaitable[Any]], send: _Send) -> None:
        connection: _Connection
        body: BodyCollector
        connection, headers, body = scope["modelserver"]
        while not body.is_complete and body.error is None:
            if (await receive())["type"] == "http.disconnect":
                return
        if body.error is None:
            query = scope["query_string"].decode("latin-1")
            head = HttpHead(scope["method"], scope["raw_path"].decode("latin-1"), headers, query)
            await _Exchange(head, body.body(), connection, send, self).run(self.frontend)
            return
        # The connection stays open and the rest of the body is dropped as it comes: a client that
        # sends all of it before it reads gets the answer and not a reset. One that asked first may not
        # send it at all, and then the start of its next request is unknown.
        response = self.frontend.errors(scope["raw_path"].decode("latin-1")).failed(body.error)
        is_last = "expect" in headers or self.is_retiring
        await _write(response, send, (*response.headers, _CLOSE) if is_last else response.headers)


class _Exchange(HttpExchange):
    """One request and its way back: a future for the answer, and the writer of an answer in pieces."""

    __slots__ = ("_answer_head", "_app", "_connection", "_done", "_has_begun", "_send", "_unsent")

    def __init__(self, head: HttpHead, body: Buffer, connection: _Connection, send: _Send, app: _App) -> None:
        self.head = head
        self.body = body
        self.on_disconnect = None
        self._connection = connection
        self._send = send
        self._app = app
        self._has_begun = False
        self._unsent: list[Buffer] = []
        # The complete answer, or None when it was written in pieces or the client left.
        self._done: asyncio.Future[HttpResponse | None] = connection.loop.create_future()
        self._answer_head: _Message | None = None  # of an answer in pieces, until it is sent

    @property
    def peer(self) -> str:
        return peer_of(self._connection.transport)

    async def run(self, frontend: HttpHandler) -> None:
        """Let the frontend answer, and send what it says."""
        frontend.handle(self)
        self._connection.exchange = self
        try:
            response = await self._done
        finally:
            self._connection.exchange = None
        if response is not None:
            await _write(response, self._send, self._last(response.headers))

    def respond(self, response: HttpResponse | None) -> None:
        if not self._done.done():  # else the client has left
            self._done.set_result(response)

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        self._answer_head = _head(status, self._last(headers))
        return self

    def dismiss(self) -> None:
        """Answer that it will not be answered; what has begun cannot be told any more, the missing end does."""
        if self._done.done():
            return
        if self._has_begun:
            self._connection.abort()
            return
        self.respond(self._app.frontend.errors(self.head.path).refused(503, DISMISSAL, "unavailable"))
        if self.on_disconnect is not None:
            self.on_disconnect()

    def _last(self, headers: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """With the news that the connection ends, if the server is about to."""
        return (*headers, _CLOSE) if self._app.is_retiring else headers

    def lost(self) -> None:
        """The client has left."""
        self.respond(None)
        if self.on_disconnect is not None:
            self.on_disconnect()

    def send(self, data: Buffer) -> bool:
        """Keep `data` for `wait_for_room`: an ASGI server is only ever awaited."""
        if self._done.done():
            raise ConnectionResetError("the client has left")
        self._unsent.append(data)
        return False

    async def wait_for_room(self) -> None:
        unsent, self._unsent = self._unsent, []
        for data in unsent:
            await self.write(data)

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
        self.respond(None)

    def abort(self) -> None:
        """End without the end of the body."""
        if not self._done.done():
            self._connection.abort()
            self.respond(None)

    async def _send_head(self) -> None:
        head, self._answer_head = self._answer_head, None
        if head is not None:
            self._has_begun = True
            await self._send(head)


def _head(status: int, headers: Sequence[tuple[str, str]]) -> _Message:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def _write(response: HttpResponse, send: _Send, headers: Sequence[tuple[str, str]]) -> None:
    head = _head(response.status, headers)
    head["headers"].append((b"content-length", b"%d" % sum(map(len, response.body))))
    await send(head)
    body = response.body or (b"",)
    last = len(body) - 1
    for index, buffer in enumerate(body):
        await send({"type": "http.response.body", "body": buffer, "more_body": index < last})
