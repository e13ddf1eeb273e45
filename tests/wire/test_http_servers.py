"""Everything that an HTTP wire must do, asked of both: our own, and uvicorn as the reference."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import numpy as np
import pytest
import tritonclient.http
import tritonclient.http.aio
import uvloop
from support.echo import EchoModel, echo_dataplane
from support.grpc_calls import turns
from support.http_calls import LENGTH, binary_body, fp32

from modelserver.app.frontends import http_frontend
from modelserver.errors import UnavailableError
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.protocol.exchange import HttpExchange, HttpHandler
from modelserver.protocol.response import HttpResponse
from modelserver.wire.address import Address
from modelserver.wire.limits import WireLimits
from modelserver.wire.native_server import NativeServer
from modelserver.wire.reference.uvicorn_server import UvicornServer

AnyServer = NativeServer | UvicornServer


def _native(frontend: HttpHandler, address: Address, limits: WireLimits | None = None) -> NativeServer:
    return NativeServer(address, http=frontend, limits=limits)


make_server: Callable[..., AnyServer] = _native

ADDRESS = "127.0.0.1"
LIMIT = 8 << 20


@pytest.fixture(autouse=True, params=[_native, UvicornServer], ids=["native", "uvicorn"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test of this file runs on each of the servers."""
    monkeypatch.setitem(globals(), "make_server", request.param)


class FunctionFrontend(HttpHandler):
    """Answers by a function; keeps every exchange."""

    def __init__(self, answer: Callable[[HttpExchange], None]) -> None:
        self.answer = answer
        self.exchanges: list[HttpExchange] = []
        self.arrived = asyncio.Event()

    def handle(self, exchange: HttpExchange) -> None:
        self.exchanges.append(exchange)
        self.arrived.set()
        self.answer(exchange)


def _hold(exchange: HttpExchange) -> None:
    """Answer nothing yet."""


def _mirror(exchange: HttpExchange) -> None:
    head = exchange.head
    document = {"method": head.method, "path": head.path, "query": head.query, "bytes": len(exchange.body)}
    exchange.respond(HttpResponse(200, [("X-Seen", head.headers.get("x-sent", ""))], (json.dumps(document).encode(),)))


@asynccontextmanager
async def _serve(frontend: HttpHandler, grace_s: float = 5, **options: Any) -> AsyncIterator[AnyServer]:
    server = make_server(frontend, Address(ADDRESS, 0, **options), WireLimits(max_body_bytes=LIMIT))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s)


def _client(server: AnyServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{ADDRESS}:{server.port}", timeout=10)


def _echo_frontend(model: EchoModel) -> HttpFrontend:
    return http_frontend(echo_dataplane(model), cast("Any", None))


async def test_a_request_arrives_as_it_was_sent() -> None:
    async with _serve(FunctionFrontend(_mirror)) as server, _client(server) as client:
        answer = await client.post("/v2/a%20b?x=1&y=%20", content=b"12345", headers={"X-Sent": "yes"})
    assert answer.json() == {"method": "POST", "path": "/v2/a%20b", "query": "x=1&y=%20", "bytes": 5}
    assert answer.headers["x-seen"] == "yes"
    assert set(answer.headers) == {"x-seen", "content-length"}


async def test_head_has_headers_and_no_body() -> None:
    async with _serve(FunctionFrontend(_mirror)) as server, _client(server) as client:
        answer = await client.head("/v2")
    assert answer.content == b""
    assert int(answer.headers["content-length"]) > 0


@pytest.mark.parametrize("size", [0, 1, 65536, 1 << 20, LIMIT])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_bodies_of_all_sizes(size: int, is_chunked: bool) -> None:
    seen: list[bytes] = []

    def keep(exchange: HttpExchange) -> None:
        seen.append(bytes(exchange.body))
        exchange.respond(HttpResponse())

    body = np.random.default_rng(0).bytes(size)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, size, 100_000):
            yield body[start : start + 100_000]

    async with _serve(FunctionFrontend(keep)) as server, _client(server) as client:
        answer = await client.post("/", content=pieces() if is_chunked else body)
    assert answer.status_code == 200
    assert seen == [body]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_refused_and_the_connection_lives(is_chunked: bool) -> None:
    frontend = FunctionFrontend(_mirror)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield bytes(1 << 20)

    async with _serve(frontend) as server, _client(server) as client:
        answer = await client.post("/", content=pieces() if is_chunked else bytes(LIMIT + 1))
        assert answer.status_code == 413
        assert "--http-max-input-size" in answer.json()["error"]
        assert not frontend.exchanges
        assert (await client.get("/")).status_code == 200


async def test_a_client_that_asks_first_need_not_send_a_body_that_is_too_large() -> None:
    async with _serve(FunctionFrontend(_mirror)) as server:
        reader, writer = await asyncio.open_connection(ADDRESS, server.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()


async def test_large_answers_are_sent_from_their_buffers() -> None:
    parts = (b"head", memoryview(np.arange(1 << 20, dtype=np.uint8)), b"", b"tail")
    frontend = FunctionFrontend(lambda exchange: exchange.respond(HttpResponse(200, [], parts)))
    async with _serve(frontend) as server, _client(server) as client:
        answer = await client.get("/")
    assert answer.content == b"".join(parts)


async def test_requests_of_one_connection_are_answered_in_order() -> None:
    async with _serve(FunctionFrontend(_mirror)) as server:
        reader, writer = await asyncio.open_connection(ADDRESS, server.port)
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % index for index in range(20)))
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 20 or not answers.endswith(b"}"):
            answers += await asyncio.wait_for(reader.read(65536), 60)
        writer.close()
    positions = [answers.index(b'"/%d"' % index) for index in range(20)]
    assert positions == sorted(positions)


async def _send_raw(server: AnyServer, data: bytes) -> bytes:
    """All that comes back until the server closes."""
    reader, writer = await asyncio.open_connection(ADDRESS, server.port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


@pytest.mark.parametrize("data", [b"certainly not HTTP\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"])
async def test_what_is_not_http_is_refused(data: bytes) -> None:
    async with _serve(FunctionFrontend(_mirror)) as server:
        head, _, body = (await _send_raw(server, data)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]


async def test_headers_without_end_are_cut_off() -> None:
    async with _serve(FunctionFrontend(_mirror)) as server:
        reader, writer = await asyncio.open_connection(ADDRESS, server.port)
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(bytes(b"x" * 65536))
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 431")
        writer.close()


@pytest.mark.parametrize("length", [b"\xb2", b"9" * 5000, b"-1", b"\xd9\xa3"])
async def test_a_strange_header_length_is_left_to_the_frontend(length: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 200000\r\n"
    async with _serve(FunctionFrontend(_mirror)) as server:
        answer = await _send_raw(server, head + LENGTH.encode() + b": " + length + b"\r\n\r\n" + bytes(200_000))
    assert answer.startswith(b"HTTP/1.1 200")


async def test_a_client_that_leaves_is_noticed() -> None:
    model = EchoModel(holds=True)
    frontend = FunctionFrontend(_echo_frontend(model).handle)
    async with _serve(frontend) as server:
        body, headers = binary_body([fp32("INPUT", [1])])
        lengths = f"Content-Length: {len(body)}\r\n{LENGTH}: {headers[LENGTH]}"
        _, writer = await asyncio.open_connection(ADDRESS, server.port)
        writer.write(f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n{lengths}\r\n\r\n".encode() + body)
        await asyncio.wait_for(frontend.arrived.wait(), 60)
        cancel, gone = frontend.exchanges[0].on_disconnect, asyncio.Event()
        assert cancel is not None
        frontend.exchanges[0].on_disconnect = gone.set
        writer.close()
        await asyncio.wait_for(gone.wait(), 60)
        cancel()
    assert len(model.cancelled) == 1


async def test_an_answer_after_the_client_left_is_dropped() -> None:
    frontend = FunctionFrontend(_hold)
    gone = asyncio.Event()
    async with _serve(frontend) as server:
        _, writer = await asyncio.open_connection(ADDRESS, server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(frontend.arrived.wait(), 60)
        frontend.exchanges[0].on_disconnect = gone.set
        writer.close()
        await asyncio.wait_for(gone.wait(), 60)
        frontend.exchanges[0].respond(HttpResponse())


async def test_a_body_that_never_ends_is_forgotten_with_its_connection() -> None:
    frontend = FunctionFrontend(_mirror)
    async with _serve(frontend) as server:
        _, writer = await asyncio.open_connection(ADDRESS, server.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc")
        await writer.drain()
        writer.close()
    assert not frontend.exchanges


async def test_an_answer_in_pieces() -> None:
    async def stream(exchange: HttpExchange) -> None:
        writer = exchange.start(200, [("Content-Type", "text/event-stream")])
        for index in range(3):
            await writer.write(b"data: %d\n\n" % index)
        await writer.close()

    tasks: list[asyncio.Task[None]] = []
    frontend = FunctionFrontend(lambda exchange: tasks.append(asyncio.ensure_future(stream(exchange))))
    async with _serve(frontend) as server, _client(server) as client:
        answer = await client.get("/")
    assert answer.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert answer.headers["content-type"] == "text/event-stream"


async def test_a_writer_learns_that_the_client_left() -> None:
    frontend = FunctionFrontend(_hold)
    gone = asyncio.Event()
    async with _serve(frontend) as server:
        reader, writer = await asyncio.open_connection(ADDRESS, server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(frontend.arrived.wait(), 60)
        exchange = frontend.exchanges[0]
        exchange.on_disconnect = gone.set
        pieces = exchange.start(200, [])
        await pieces.write(b"one")
        await asyncio.wait_for(reader.readuntil(b"one"), 60)
        writer.close()
        await asyncio.wait_for(gone.wait(), 60)
        with pytest.raises(ConnectionError):
            await pieces.write(b"two")


async def test_stop_lets_requests_in_flight_finish() -> None:
    frontend = FunctionFrontend(_hold)
    async with _serve(frontend) as server, _client(server) as client:
        pending = asyncio.ensure_future(client.get("/"))
        await asyncio.wait_for(frontend.arrived.wait(), 60)
        stopping = asyncio.ensure_future(server.stop(10))
        await turns()
        frontend.exchanges[0].respond(HttpResponse(200, [], (b"done",)))
        answer = await pending
        await asyncio.wait_for(stopping, 60)
        with pytest.raises(httpx.ConnectError):
            await client.get("/")
    assert (answer.text, answer.headers["connection"]) == ("done", "close")


async def test_stop_closes_idle_connections_and_ends_what_outlives_its_grace() -> None:
    """What is given up is told so."""
    frontend = FunctionFrontend(_hold)
    left = asyncio.Event()
    async with _serve(frontend, grace_s=0.05) as server:
        idle_reader, idle_writer = await asyncio.open_connection(ADDRESS, server.port)
        reader, writer = await asyncio.open_connection(ADDRESS, server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(frontend.arrived.wait(), 60)
        frontend.exchanges[0].on_disconnect = left.set
        stopping = asyncio.ensure_future(server.stop(0.05))
        assert await asyncio.wait_for(idle_reader.read(), 60) == b""
        await asyncio.wait_for(stopping, 60)
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 503 ")
        idle_writer.close()
        writer.close()
    assert left.is_set()


def test_on_uvloop() -> None:
    async def scenario() -> None:
        frontend = FunctionFrontend(_hold)
        async with _serve(_echo_frontend(EchoModel())) as server, _client(server) as client:
            body, headers = binary_body([fp32("INPUT", range(100_000))], parameters={"binary_data_output": True})
            answer = await client.post("/v2/models/echo/infer", content=body, headers=headers)
            assert answer.content.endswith(body[int(headers[LENGTH]) :])
        async with _serve(frontend, grace_s=0.05) as server:
            _, writer = await asyncio.open_connection(ADDRESS, server.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.wait_for(frontend.arrived.wait(), 60)
        writer.close()

    uvloop.run(scenario())


async def test_stop_may_come_twice_or_before_start() -> None:
    server = make_server(FunctionFrontend(_mirror), Address(ADDRESS, 0))
    await server.stop(1)
    await server.start()
    await server.stop(1)
    await server.stop(1)


async def test_a_taken_port_is_refused_with_the_flag_to_change() -> None:
    async with _serve(FunctionFrontend(_mirror)) as server:
        second = make_server(FunctionFrontend(_mirror), Address(ADDRESS, server.port, "--metrics-port"))
        with pytest.raises(UnavailableError, match=f"{ADDRESS}:{server.port}.*--metrics-port"):
            await second.start()


async def test_an_address_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnavailableError, match="no such host"):
        await make_server(FunctionFrontend(_mirror), Address("no such host", 0)).start()


async def test_an_address_of_another_machine_is_refused_with_the_flag_to_change() -> None:
    server = make_server(FunctionFrontend(_mirror), Address("192.0.2.1", 0, "--metrics-port"))
    with pytest.raises(UnavailableError, match="no such address, choose another with --metrics-address"):
        await server.start()


async def test_a_port_may_be_shared() -> None:
    async with _serve(FunctionFrontend(_mirror), reuse_port=True) as first:
        second = make_server(FunctionFrontend(_mirror), Address(ADDRESS, first.port, reuse_port=True))
        await second.start()
        assert second.port == first.port
        await second.stop(1)


def _loopback_addresses() -> list[str]:
    """`localhost`, and the IPv6 loopback where the machine has one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return ["localhost", "::1"]
    return ["localhost"]


@pytest.mark.parametrize("host", _loopback_addresses())
async def test_listens_on_names_and_ipv6(host: str) -> None:
    server = make_server(FunctionFrontend(_mirror), Address(host, 0))
    await server.start()
    async with httpx.AsyncClient() as client:
        url_host = f"[{host}]" if ":" in host else host
        assert (await client.get(f"http://{url_host}:{server.port}/")).status_code == 200
    await server.stop(1)


def _triton_tensors(library: Any, array: np.ndarray[Any, Any], is_binary: bool) -> tuple[list[Any], list[Any]]:
    tensor = library.InferInput("INPUT", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array, binary_data=is_binary)
    return [tensor], [library.InferRequestedOutput("OUTPUT", binary_data=is_binary)]


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
@pytest.mark.parametrize("is_binary", [True, False])
async def test_tritonclient(is_binary: bool, algorithm: str | None) -> None:
    array = np.linspace(-1, 1, 1000, dtype=np.float32)

    def run(url: str) -> np.ndarray[Any, Any]:
        with tritonclient.http.InferenceServerClient(url) as client:
            assert client.is_server_live()
            assert client.is_model_ready("echo", "1")
            inputs, outputs = _triton_tensors(tritonclient.http, array, is_binary)
            result = client.infer(
                "echo",
                inputs,
                outputs=outputs,
                request_id="7",
                request_compression_algorithm=algorithm,
                response_compression_algorithm=algorithm,
            )
            assert result.get_response()["id"] == "7"
            return cast("np.ndarray[Any, Any]", result.as_numpy("OUTPUT"))

    async with _serve(_echo_frontend(EchoModel())) as server:
        assert np.array_equal(await asyncio.to_thread(run, f"{ADDRESS}:{server.port}"), array)


async def test_tritonclient_aio() -> None:
    array = np.arange(6, dtype=np.float32)
    async with (
        _serve(_echo_frontend(EchoModel())) as server,
        tritonclient.http.aio.InferenceServerClient(f"{ADDRESS}:{server.port}") as client,
    ):
        assert await client.is_server_ready()
        inputs, _ = _triton_tensors(tritonclient.http.aio, array, True)
        result = await client.infer("echo", inputs)
        with pytest.raises(tritonclient.http.aio.InferenceServerException, match="unknown model"):
            await client.infer("nobody", inputs)
    assert np.array_equal(result.as_numpy("OUTPUT"), array)
