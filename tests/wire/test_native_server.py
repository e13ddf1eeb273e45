"""The life of a port: both protocols through one socket, the sweep, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from support.certificates import Authority
from support.loops import on_both_loops

from modelserver.errors import UnavailableError
from modelserver.protocol.call import Method, StreamCall, UnaryCall
from modelserver.protocol.exchange import HttpExchange, HttpHandler
from modelserver.protocol.response import HttpResponse
from modelserver.telemetry.wire_counts import Protocol, WireCounts
from modelserver.wire import port as port_module
from modelserver.wire.address import Address
from modelserver.wire.limits import TimeLimits, WireLimits
from modelserver.wire.native_server import NativeServer
from modelserver.wire.tls import TlsFiles

HOST = "127.0.0.1"


class Http(HttpHandler):
    """Answers each request with its path, or when it is told to."""

    def __init__(self, holds: bool = False) -> None:
        self.held: list[HttpExchange] = []
        self._holds = holds

    def handle(self, exchange: HttpExchange) -> None:
        if self._holds:
            self.held.append(exchange)
        else:
            self.answer(exchange)

    def answer(self, exchange: HttpExchange) -> None:
        exchange.respond(HttpResponse(200, [], (json.dumps(exchange.head.path).encode(),)))


class Grpc:
    """Gives each message back, or when it is told to; knows how often it was told to drain."""

    def __init__(self, holds: bool = False) -> None:
        self.held: list[UnaryCall] = []
        self.num_drains = 0
        self.draining = asyncio.Event()
        self._holds = holds
        self.methods = {"/s/Echo": Method(unary=self._echo), "/s/Chat": Method(stream=self._chat)}

    def _echo(self, call: UnaryCall) -> None:
        if self._holds:
            self.held.append(call)
        else:
            call.reply((call.message,))

    async def _chat(self, call: StreamCall) -> None:
        async for message in call.messages:
            await call.send((message,))
        await self.draining.wait()

    def drain(self) -> None:
        self.num_drains += 1
        self.draining.set()


class Running:
    """A port that listens, and its clients."""

    def __init__(self, server: NativeServer, counts: WireCounts, client: httpx.AsyncClient) -> None:
        self.server = server
        self.counts = counts
        self.http = client
        self.url = f"http://{HOST}:{server.port}"

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"{HOST}:{self.server.port}", options=[("grpc.use_local_subchannel_pool", 1)])

    def open(self, protocol: Protocol) -> int:
        return self.counts.connections_open[protocol]


@asynccontextmanager
async def serving(http: Http | None, grpc_: Grpc | None, **options: Any) -> AsyncIterator[Running]:
    counts = WireCounts()
    server = NativeServer(Address(HOST, 0), http=http, grpc=grpc_, counts=counts, **options)
    await server.start()
    try:
        async with httpx.AsyncClient(timeout=20, http2=True) as client:
            yield Running(server, counts, client)
    finally:
        await server.stop(1)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for happens at the other end
            await asyncio.sleep(0.002)


@on_both_loops
async def test_one_port_speaks_everything() -> None:
    async with serving(Http(), Grpc()) as running:
        assert (await running.http.get(f"{running.url}/one")).json() == "/one"
        async with httpx.AsyncClient(http1=False, http2=True) as client:
            answer = await client.get(f"{running.url}/two")
            assert (answer.json(), answer.http_version) == ("/two", "HTTP/2")
            async with running.channel() as channel:
                assert await channel.unary_unary("/s/Echo")(b"three") == b"three"
                assert running.open(Protocol.HTTP1) == 1
                assert running.open(Protocol.HTTP2) == 2
        await until(lambda: running.open(Protocol.HTTP2) == 0)
    assert running.counts.connections_opened == {Protocol.UNKNOWN: 3, Protocol.HTTP1: 1, Protocol.HTTP2: 2}
    assert running.open(Protocol.HTTP1) == running.open(Protocol.UNKNOWN) == 0
    assert running.counts.open_streams == 0
    assert not running.counts.violations


async def test_a_taken_port_is_refused_with_the_flag_to_change() -> None:
    async with serving(Http(), None) as running:
        second = NativeServer(Address(HOST, running.server.port, "--metrics-port"))
        with pytest.raises(UnavailableError, match=f"{HOST}:{running.server.port}.*--metrics-port"):
            await second.start()


async def test_stop_may_come_twice_or_before_start() -> None:
    server = NativeServer(Address(HOST, 0), http=Http())
    await server.stop(1)
    await server.start()
    await server.stop(1)
    await server.stop(1)


# The sweep.


@on_both_loops
async def test_connections_are_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_SWEEP_S", 0.01)
    monkeypatch.setattr(port_module, "_SWEEP_SLICE", 2)
    limits = WireLimits(times=TimeLimits(head_s=0.05, http1_idle_s=0.05))
    async with serving(Http(), None, limits=limits) as running:
        idle = [await asyncio.open_connection(HOST, running.server.port) for _ in range(7)]
        reader, writer = await asyncio.open_connection(HOST, running.server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        for silent, _ in idle:
            assert await asyncio.wait_for(silent.read(), 60) == b""
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 200")
        for _, client in [*idle, (reader, writer)]:
            client.close()
        assert sum(running.counts.violations.values()) == 7, "who has asked something is idle, not slow"


class Faulty:
    """A connection that cannot be looked at."""

    is_aborted = False

    def sweep(self, now_s: float) -> None:
        raise ValueError("a fault")

    def abort(self) -> None:
        self.is_aborted = True


async def test_a_connection_that_cannot_be_looked_at_is_closed_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(port_module, "_SWEEP_S", 0.01)
    limits = WireLimits(times=TimeLimits(head_s=0.02))
    async with serving(Http(), None, limits=limits) as running:
        port = running.server._port
        assert port is not None
        faulty: Any = Faulty()
        port.context.connections.add(faulty)
        reader, writer = await asyncio.open_connection(HOST, running.server.port)
        assert await asyncio.wait_for(reader.read(), 60) == b"", "the others are looked at all the same"
        writer.close()
        await until(lambda: faulty.is_aborted)
        port.context.connections.discard(faulty)
    assert "checking a connection failed" in caplog.text


# The end.


@on_both_loops
async def test_stop_lets_what_is_in_flight_finish_over_both_protocols() -> None:
    http, grpc_ = Http(holds=True), Grpc(holds=True)
    async with serving(http, grpc_) as running, running.channel() as channel:
        asked = asyncio.ensure_future(running.http.get(f"{running.url}/one"))
        called = asyncio.ensure_future(channel.unary_unary("/s/Echo")(b"two"))  # type: ignore[arg-type]
        await until(lambda: http.held and grpc_.held)
        stopping = asyncio.ensure_future(running.server.stop(10))
        await until(lambda: grpc_.num_drains)
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(running.url)
        http.answer(http.held[0])
        grpc_.held[0].reply((b"two",))
        assert (await asked).json() == "/one"
        assert await called == b"two"
        await asyncio.wait_for(stopping, 60)
    assert grpc_.num_drains == 1
    assert not running.counts.violations


@on_both_loops
async def test_streams_end_when_the_frontend_drains() -> None:
    grpc_ = Grpc()
    async with serving(None, grpc_) as running, running.channel() as channel:
        chat = channel.stream_stream("/s/Chat")()
        await chat.write(b"a")
        assert await chat.read() == b"a"
        await chat.done_writing()
        await running.server.stop(10)
        assert await chat.code() is grpc.StatusCode.OK


@on_both_loops
async def test_stop_tells_what_outlives_its_grace(caplog: pytest.LogCaptureFixture) -> None:
    http, grpc_ = Http(holds=True), Grpc(holds=True)
    async with serving(http, grpc_) as running, running.channel() as channel:
        asked = asyncio.ensure_future(running.http.get(f"{running.url}/one"))
        called = asyncio.ensure_future(channel.unary_unary("/s/Echo")(b"three"))  # type: ignore[arg-type]
        await until(lambda: http.held and grpc_.held)
        left: list[str] = []
        http.held[0].on_disconnect = lambda: left.append("http")
        grpc_.held[0].on_cancel = lambda: left.append("grpc")
        with caplog.at_level(logging.WARNING):
            await running.server.stop(0.05)
        answer = await asked
        assert (answer.status_code, answer.headers["connection"]) == (503, "close")
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await called
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE
        assert told.value.details() == answer.json()["error"]
        assert sorted(left) == ["grpc", "http"]
    assert "gave 2 connections up at the end of the grace" in caplog.text


async def test_a_port_that_serves_one_protocol_refuses_the_other_in_words() -> None:
    async with serving(Http(), None) as running, running.channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/s/Echo")(b"")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "gRPC" in (refused.value.details() or "")


async def test_nothing_is_left_of_a_port() -> None:
    threads, tasks = threading.active_count(), asyncio.all_tasks()
    async with serving(Http(), Grpc()) as running:
        await running.http.get(running.url)
    assert asyncio.all_tasks() <= tasks
    assert threading.active_count() <= threads + 1


class Pieces(Http):
    """Begins each answer, and leaves it there."""

    def handle(self, exchange: HttpExchange) -> None:
        self.held.append(exchange)
        exchange.start(200, [("Content-Type", "text/event-stream")])


@on_both_loops
async def test_what_outlives_the_grace_is_told_by_what_its_protocol_has() -> None:
    """A stream of gRPC, a request and the one that is pipelined behind it, and half a body."""
    http, grpc_ = Http(holds=True), Grpc()
    async with serving(http, grpc_) as running, running.channel() as channel:
        chat = channel.stream_stream("/s/Chat")()
        await chat.write(b"hello")
        assert await chat.read() == b"hello"
        reader, writer = await asyncio.open_connection(HOST, running.server.port)
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        upload, uploader = await asyncio.open_connection(HOST, running.server.port)
        uploader.write(b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
        await until(lambda: http.held and running.open(Protocol.HTTP1) == 2)
        await running.server.stop(0.05)
        assert await chat.code() is grpc.StatusCode.UNAVAILABLE
        first = await reader.read()
        assert first.startswith(b"HTTP/1.1 503 ")
        assert first.count(b"HTTP/1.1") == 1, "what had not begun is lost, and the close tells"
        assert (await upload.read()).startswith(b"HTTP/1.1 503 ")
        for each in (writer, uploader):
            each.close()


@on_both_loops
async def test_an_answer_that_has_begun_ends_without_its_end() -> None:
    async with serving(Pieces(), None) as running:
        reader, writer = await asyncio.open_connection(HOST, running.server.port)
        writer.write(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"chunked" in head
        await running.server.stop(0.05)
        try:
            rest = await reader.read()
        except ConnectionResetError:
            rest = b""
        assert not rest.endswith(b"0\r\n\r\n")
        writer.close()


@on_both_loops
async def test_a_port_that_retires_serves_on_and_has_http1_clients_leave() -> None:
    async with serving(Http(), Grpc()) as running, running.channel() as channel:
        before = await running.http.get(f"{running.url}/one")
        assert "connection" not in before.headers
        running.server.retire()
        for _ in range(2):  # the old connection, and a new one
            answer = await running.http.get(f"{running.url}/two")
            assert (answer.json(), answer.headers["connection"]) == ("/two", "close")
        echo = channel.unary_unary("/s/Echo")
        assert await echo(b"three") == b"three"
        assert await echo(b"four") == b"four"


@on_both_loops
@pytest.mark.parametrize("is_stopping", [False, True])
async def test_a_connection_that_comes_at_the_end_is_served_over_tls_too(tmp_path: Path, is_stopping: bool) -> None:
    """The handshake tells the protocol before anything is asked: what is asked then is answered all the same."""
    authority = Authority(tmp_path)
    pair = authority.pair("server")
    async with serving(Http(), None, tls=TlsFiles(str(pair.certificate), str(pair.key))) as running:
        context = authority.client_context(("http/1.1",))
        reader, writer = await asyncio.open_connection(HOST, running.server.port, ssl=context)
        if is_stopping:
            await until(lambda: running.open(Protocol.HTTP1) == 1)
            stopping = asyncio.ensure_future(running.server.stop(10))
            await asyncio.sleep(0)
        else:
            running.server.retire()
            writer.close()
            reader, writer = await asyncio.open_connection(HOST, running.server.port, ssl=context)
            await until(lambda: running.counts.connections_opened[Protocol.HTTP1] == 2)
        writer.write(b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"Connection: close" in answer
        writer.close()
        if is_stopping:
            await stopping
