"""Proxies in front: nginx (grpc_pass, proxy_pass) and HAProxy (HTTP/2 to the server), with clients behind them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from support.proxies import Proxy, running_proxy
from support.wires import RunningWire

MIB = 1 << 20
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@pytest.fixture(
    params=[
        pytest.param("nginx", marks=pytest.mark.tool("nginx")),
        pytest.param("haproxy", marks=pytest.mark.tool("haproxy")),
    ]
)
def proxy(request: pytest.FixtureRequest, wire: RunningWire, tmp_path: Path) -> Iterator[Proxy]:
    with running_proxy(request.param, wire.url, tmp_path) as running:
        yield running


def test_grpc(proxy: Proxy, wire: RunningWire) -> None:
    with grpc.insecure_channel(proxy.grpc_url, UNLIMITED) as channel:
        echo = channel.unary_unary("/test.Wire/Echo")
        for size in (0, 1, 16379, 70_000, 64 * MIB):
            assert echo(bytes(size), timeout=60) == bytes(size)
        futures = [echo.future(b"%d" % number) for number in range(300)]
        assert [future.result(20) for future in futures] == [b"%d" % number for number in range(300)]


def test_grpc_streams(proxy: Proxy) -> None:
    with grpc.insecure_channel(proxy.grpc_url, UNLIMITED) as channel:
        messages = [b"%d" % number * (number % 100) for number in range(1000)]
        assert list(channel.stream_stream("/test.Wire/Chat")(iter(messages), timeout=20)) == messages
        answers = list(channel.stream_stream("/test.Wire/Count")(iter([b"1000 1000"]), timeout=20))
        assert len(answers) == 1000


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.1])
def test_grpc_streams_that_the_server_ends_first(proxy: Proxy, delay_s: float) -> None:
    """The client ends its side while the answer is on its way, or behind it: HAProxy must not be told to stop."""

    def ask() -> Iterator[bytes]:
        yield b"1000 1000"
        time.sleep(delay_s)

    with grpc.insecure_channel(proxy.grpc_url, UNLIMITED) as channel:
        for _ in range(10):
            assert len(list(channel.stream_stream("/test.Wire/Count")(ask(), timeout=20))) == 1000


def test_grpc_details(proxy: Proxy, wire: RunningWire) -> None:
    with grpc.insecure_channel(proxy.grpc_url, UNLIMITED) as channel:
        found = json.loads(
            channel.unary_unary("/test.Wire/Metadata")(
                b"", metadata=(("x-bin", b"\0\xff"), ("x-text", "abc")), timeout=20
            )
        )
        assert (found["x-bin"], found["x-text"]) == ([0, 255], "abc")
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary("/test.Wire/Fail")("5 é漢 %".encode(), timeout=20)
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, "é漢 %")


def test_grpc_deadlines_and_cancellation(proxy: Proxy, wire: RunningWire) -> None:
    before = wire.grpc.num_cancelled
    with grpc.insecure_channel(proxy.grpc_url) as channel:
        # Connects, so that the deadline is spent in the handler.
        assert channel.unary_unary("/test.Wire/Echo")(b"before", timeout=20) == b"before"
        late = channel.unary_unary("/test.Wire/Hold").future(b"", timeout=1.0)
        wire.until(lambda: len(wire.grpc.held) == 1, "the call is held")
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wire.until(lambda: not wire.grpc.held, "its handler was told")
        call = channel.unary_unary("/test.Wire/Hold").future(b"")
        wire.until(lambda: len(wire.grpc.held) == 1, "the call is held")
        call.cancel()
        wire.until(lambda: wire.grpc.num_cancelled == before + 2, "both handlers were cancelled")
        assert channel.unary_unary("/test.Wire/Echo")(b"after", timeout=20) == b"after"


def test_http(proxy: Proxy) -> None:
    with httpx.Client(base_url=proxy.http_url) as client:
        for size in (0, 1, 70_000, 5 * MIB):
            assert client.post("/echo", content=bytes(size)).content == bytes(size)
            assert len(client.get(f"/size/{size}").content) == size
        assert client.get("/pieces/100/10000").content == bytes(1_000_000)
        assert client.get("/nowhere").status_code == 404
        assert client.post("/echo", content=(b"x" * 1000 for _ in range(100))).content == b"x" * 100_000


def test_a_client_that_leaves(proxy: Proxy, wire: RunningWire) -> None:
    with httpx.Client(base_url=proxy.http_url, timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
        client.get("/hold")
    wire.until(lambda: not wire.http.held, "the handler was told")
