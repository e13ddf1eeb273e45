"""Proxies in front: nginx (grpc_pass, proxy_pass) and HAProxy (HTTP/2 to the server), with clients behind them."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from support.layouts import free_port
from support.tools import tool
from support.wires import RunningWire

MIB = 1 << 20
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

NGINX = """
daemon off;
worker_processes 1;
pid {directory}/nginx.pid;
error_log {directory}/error.log warn;
events {{ }}
http {{
    access_log off;
    client_max_body_size 80m;
    client_body_buffer_size 8m;
    proxy_buffering off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    upstream server {{ server {server}; keepalive 8; }}
    server {{
        listen 127.0.0.1:{grpc_port} http2;
        location / {{ grpc_pass grpc://server; }}
    }}
    server {{
        listen 127.0.0.1:{http_port};
        location / {{ proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    }}
}}
"""

HAPROXY = """
defaults
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    mode http
frontend grpc
    bind 127.0.0.1:{grpc_port} proto h2
    default_backend http2
backend http2
    server one {server} proto h2
defaults
    timeout connect 5s
    timeout client 30s
    timeout server 30s
    mode http
    option abortonclose
frontend http
    bind 127.0.0.1:{http_port}
    default_backend http1
backend http1
    server one {server}
"""


class Proxy:
    """A proxy that runs: where it takes gRPC, and where HTTP/1.1."""

    def __init__(self, grpc_port: int, http_port: int) -> None:
        self.grpc_url = f"127.0.0.1:{grpc_port}"
        self.http_url = f"http://127.0.0.1:{http_port}"


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def started(command: list[str], ports: tuple[int, int]) -> Iterator[Proxy]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        for port in ports:
            while not listens(port):
                assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"{command[0]} does not listen"
                time.sleep(0.02)
        yield Proxy(*ports)
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(
    params=[
        pytest.param("nginx", marks=pytest.mark.tool("nginx")),
        pytest.param("haproxy", marks=pytest.mark.tool("haproxy")),
    ]
)
def proxy(request: pytest.FixtureRequest, wire: RunningWire, tmp_path: Path) -> Iterator[Proxy]:
    name = request.param
    template = {"nginx": NGINX, "haproxy": HAPROXY}[name]
    ports = (free_port(), free_port())
    config = tmp_path / "proxy.conf"
    config.write_text(template.format(directory=tmp_path, server=wire.url, grpc_port=ports[0], http_port=ports[1]))
    arguments = {"nginx": ["-p", str(tmp_path), "-c", str(config)], "haproxy": ["-f", str(config)]}[name]
    with started([tool(name), *arguments], ports) as running:
        yield running


def test_grpc(proxy: Proxy, wire: RunningWire) -> None:
    with grpc.insecure_channel(proxy.grpc_url, UNLIMITED) as channel:
        echo = channel.unary_unary("/test.Wire/Echo")
        for size in (0, 1, 16379, 70_000, 5 * MIB):
            assert echo(bytes(size), timeout=20) == bytes(size)
        futures = [echo.future(b"%d" % number) for number in range(300)]
        assert [future.result(20) for future in futures] == [b"%d" % number for number in range(300)]


def test_grpc_streams(proxy: Proxy) -> None:
    with grpc.insecure_channel(proxy.grpc_url, UNLIMITED) as channel:
        messages = [b"%d" % number * (number % 100) for number in range(1000)]
        assert list(channel.stream_stream("/test.Wire/Chat")(iter(messages), timeout=20)) == messages
        answers = list(channel.stream_stream("/test.Wire/Count")(iter([b"1000 1000"]), timeout=20))
        assert len(answers) == 1000


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
