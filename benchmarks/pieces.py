"""What a small HTTP request costs, by piece: `python -m benchmarks.pieces` prints µs of CPU per request.

The digits MLP over HTTP/1.1, in JSON and in binary, from `buffer_updated` to the transport's `write`, with 32
connections that ask at once. There is no socket, so the kernel's part is missing, and neighbours disturb little: the
least of many rounds is given, of all threads. Decoding and encoding are also measured alone.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks import requests
from benchmarks.load import Load
from modelserver.app.frontends import http_frontend
from modelserver.core.datatype import Datatype
from modelserver.core.interpreter import keep_for_good
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.frontends.http.codec import encode_infer
from modelserver.frontends.http.decoder import InferDecoder
from modelserver.frontends.http.templates import Known
from modelserver.planes.data import DataPlane, ServerMetadata
from modelserver.protocol.exchange import HttpExchange, HttpHandler
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse
from modelserver.repository.options import RepositoryOptions
from modelserver.repository.repository import ModelRepository
from modelserver.telemetry.wire_counts import WireCounts
from modelserver.wire.context import Outbox, WireContext
from modelserver.wire.http1.connection import Http1Connection
from modelserver.wire.limits import WireLimits

ROUNDS = 60
TURNS = 32  # of a round; in each, every connection asks once
CONNECTIONS = 32
_INLINE = 'parameters { key: "inline_execution" value { string_value: "auto" } }\n'
_ONE = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'


class Client:
    """What is behind the connections: counts the answers, and says when all have come."""

    def __init__(self) -> None:
        self.num_answers = 0
        self._all: asyncio.Future[None] | None = None
        self._num_wanted = 0

    def add(self) -> None:
        self.num_answers += 1
        if self.num_answers == self._num_wanted and self._all is not None:
            self._all.set_result(None)

    async def wait(self, num_wanted: int) -> None:
        if self.num_answers < num_wanted:
            self._num_wanted = num_wanted
            self._all = asyncio.get_running_loop().create_future()
            await self._all


class MemoryTransport(asyncio.Transport):
    """Takes one answer per write."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert data[9:12] == b"200", bytes(data)
        self._client.add()

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is nothing to wait for."""


class ConstantFrontend(HttpHandler):
    """Answers every request with the same, so that what is left is the wire."""

    def __init__(self, response: HttpResponse) -> None:
        self._response = response

    def handle(self, exchange: HttpExchange) -> None:
        exchange.respond(self._response)


class ConstantDataPlane:
    """Answers every inference with the same, so that what is left is the wire and the codec."""

    def __init__(self, response: InferResponse) -> None:
        self._response = response

    def infer(self, request: InFlightRequest) -> ResponseStream:
        request.stream.deliver(self._response)
        return request.stream


class Call:
    """A call that is decoded again and again, and whose answer is encoded."""

    def __init__(self, load: Load, response: InferResponse) -> None:
        self._decoder = InferDecoder(HttpLimits())
        text = load.headers.get("Inference-Header-Content-Length")
        self._head_len = None if text is None else int(text)
        self._body = load.body
        self._stream = ResponseStream()
        self._response = response
        self._request, self._form = self.decode()
        self._request.version = 1

    def decode(self) -> Known:
        return self._decoder.decode("mlp", None, self._body, self._head_len, self._stream)

    def encode(self) -> HttpResponse:
        return encode_infer(self._request, self._response, self._form)


def best_us(call: Callable[[], object], count: int = 2048) -> float:
    """The least CPU time of a call, in µs."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        began_s = time.process_time()
        for _ in range(count):
            call()
        best_s = min(best_s, time.process_time() - began_s)
    return best_s * 1e6 / count


async def wire_us(frontend: HttpHandler, load: Load) -> float:
    """The least CPU time per request of a round, in µs, when all connections ask at once."""
    client = Client()
    loop = asyncio.get_running_loop()
    context = WireContext(loop, frontend, None, WireLimits(), WireCounts(), Outbox(loop))
    connections = [Http1Connection(context) for _ in range(CONNECTIONS)]
    for connection in connections:
        connection.begin(MemoryTransport(client), b"")
    headers = "".join(f"{name}: {value}\r\n" for name, value in load.headers.items())
    head = f"POST {load.path} HTTP/1.1\r\nHost: 127.0.0.1:8000\r\n{headers}Content-Length: {len(load.body)}\r\n\r\n"
    data = head.encode() + load.body
    size = len(data)
    context.arena.memory[:size] = data  # what every connection receives

    best_s = float("inf")
    for _ in range(ROUNDS):
        began_s = time.process_time()
        for _ in range(TURNS):
            wanted = client.num_answers + CONNECTIONS
            for connection in connections:
                connection.get_buffer(size)
                connection.buffer_updated(size)
            await client.wait(wanted)
        best_s = min(best_s, time.process_time() - began_s)
    return best_s * 1e6 / (TURNS * CONNECTIONS)


async def measure(root: Path) -> None:
    repository = ModelRepository(RepositoryOptions(roots=(root,)))
    await repository.start()
    keep_for_good()  # as a server does
    image = np.random.default_rng(0).random((1, 8, 8), dtype=np.float32)
    probabilities = np.random.default_rng(1).random((1, 10), dtype=np.float32)
    digit = np.array([[7]])
    response = InferResponse(
        [Tensor("probabilities", Datatype.FP32, probabilities), Tensor("digit", Datatype.INT64, digit)]
    )
    served = http_frontend(DataPlane(repository, ServerMetadata("benchmark", "0", ())), cast("Any", None))
    coded = http_frontend(cast("Any", ConstantDataPlane(response)), cast("Any", None))
    print(f"{'digits MLP, 32 at a time':<44} {'JSON':>8} {'binary':>8}   (µs of CPU per request)")
    worker = [make("mlp", "image", image) for make in (requests.http_json, requests.http_binary)]
    inline = [make("inline", "image", image) for make in (requests.http_json, requests.http_binary)]
    calls = [Call(load, response) for load in worker]
    constant = [ConstantFrontend(call.encode()) for call in calls]
    _print(
        "wire: from bytes to an exchange and back",
        [await wire_us(*each) for each in zip(constant, worker, strict=True)],
    )
    _print("decode: from a body to a request", [best_us(call.decode) for call in calls])
    _print("encode: from a response to a body", [best_us(call.encode) for call in calls])
    _print("wire and codec", [await wire_us(coded, load) for load in worker])
    _print("everything, executed in the loop", [await wire_us(served, load) for load in inline])
    _print("everything, executed by a worker thread", [await wire_us(served, load) for load in worker])
    await repository.stop(5)


def _print(title: str, figures: list[float]) -> None:
    print(f"{title:<44} {figures[0]:>8.2f} {figures[1]:>8.2f}", flush=True)


def main() -> None:
    try:
        import uvloop

        new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    except ImportError:
        new_loop = asyncio.new_event_loop
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        digits = Path(__file__).parent.parent / "model_repository" / "digits_onnx"
        for name, more in (("mlp", _ONE), ("inline", _ONE + _INLINE)):
            shutil.copytree(digits, root / name)
            config = (digits / "config.pbtxt").read_text().replace('"digits_onnx"', f'"{name}"')
            (root / name / "config.pbtxt").write_text(config + more)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(measure(root))


if __name__ == "__main__":
    main()
