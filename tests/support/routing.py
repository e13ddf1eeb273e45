"""A router in a thread with its own event loop, and replicas that answer as a script says."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import uvloop
from support.layouts import ADDRESS

from modelserver.options.router_options import RouterOptions, RoutingOptions
from modelserver.options.server_options import ServerOptions
from modelserver.router.server import Router

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class RunningRouter:
    """A started router as a test sees it."""

    def __init__(self, router: Router, loop: asyncio.AbstractEventLoop) -> None:
        self.router = router
        self.loop = loop
        self.http_url = f"{ADDRESS}:{router.http_port}"
        self.grpc_url = f"{ADDRESS}:{router.grpc_port}"
        self.metrics_url = f"{ADDRESS}:{router.metrics_port}"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the router's loop, awaiting what it returns if need be."""

        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)


@contextmanager
def running_router(
    to: Sequence[str] = (), *, discover: str = "", own: Any = None, **server: Any
) -> Iterator[RunningRouter]:
    """Route to the addresses until the block ends; `own` are further fields of `RoutingOptions`."""
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_timeout_secs": 5}
    options = RouterOptions(
        RoutingOptions(
            to=tuple(each if "://" in each else f"http://{each}" for each in to), discover=discover, **(own or {})
        ),
        ServerOptions(**{**ports, **server}),
    )
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="router")
    thread.start()

    async def start() -> Router:
        router = Router(options)
        await router.start()
        return router

    router: Router | None = None
    try:
        router = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        yield RunningRouter(router, loop)
    finally:
        if router is not None:
            asyncio.run_coroutine_threadsafe(router.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


class ScriptedReplica:
    """An HTTP/1.1 server whose requests to other paths than readiness are given to `answer`, with their connection.

    `requests` are their heads and bodies. What `answer` returns is sent; None leaves the connection to it.
    """

    def __init__(self, answer: Callable[[ScriptedReplica, socket.socket, bytes], bytes | None]) -> None:
        self.requests: list[bytes] = []
        self.is_ready = True
        self._answer = answer
        self._listener = socket.create_server((ADDRESS, 0))
        self.url = f"{ADDRESS}:{self._listener.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, name="replica")
        self._threads = [self._acceptor]
        self._acceptor.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                thread = threading.Thread(target=self._serve, args=(connection,), name="replica-connection")
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            while (request := read_request(connection)) is not None:
                if request.startswith(b"GET /v2/health/ready"):
                    connection.sendall(OK if self.is_ready else OK.replace(b"200 OK", b"503 Not Ready"))
                    continue
                self.requests.append(request)
                answer = self._answer(self, connection, request)
                if answer is not None:
                    connection.sendall(answer)

    def cut(self) -> None:
        """End all connections, as a process does that is killed."""
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no more, and end all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(30)


def read_request(connection: socket.socket) -> bytes | None:
    """A whole request with a content-length or in chunks; None at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return None
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    is_chunked = fields.get(b"transfer-encoding") == b"chunked"
    length = int(fields.get(b"content-length", b"0"))
    while (is_chunked and not body.endswith(b"0\r\n\r\n")) or (not is_chunked and len(body) < length):
        piece = connection.recv(65536)
        if not piece:
            return None
        body += piece
    return head + b"\r\n\r\n" + body


def reset(connection: socket.socket) -> None:
    """End the connection as a system does for which it does not exist."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextmanager
def replicas(
    *answers: Callable[[ScriptedReplica, socket.socket, bytes], bytes | None],
) -> Iterator[list[ScriptedReplica]]:
    """A scripted replica for each of the answers."""
    started = [ScriptedReplica(answer) for answer in answers]
    try:
        yield started
    finally:
        for each in started:
            each.close()
