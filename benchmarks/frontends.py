"""What a small request costs between the wires: `python -m benchmarks.frontends` prints µs of CPU per request.

Frontends, data plane, model and statistics without sockets: a wire that does nothing hands equal requests to
`HttpFrontend.handle` and `Method.unary`. FP32 [1, 16] through `identity`, executed where it is submitted and by
turns of the loop, and the digits MLP on ONNX Runtime, executed by a worker thread and on the loop. The best of
several rounds. With `--keys` each request has an API key, and callers share the queues, as with --api-keys-file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks import models, requests
from modelserver.app.frontends import grpc_frontend, http_frontend
from modelserver.auth.api_keys import KeyRing, Scope, create_key
from modelserver.auth.caller_limits import NO_LIMITS
from modelserver.execution.shared_resources import SharedResources
from modelserver.frontends.grpc.frontend import GrpcFrontend
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.planes.data import DataPlane, ServerMetadata
from modelserver.planes.quotas import Callers
from modelserver.protocol.call import Method, Parts, StreamCall, UnaryCall
from modelserver.protocol.exchange import HttpExchange, HttpHead, ResponseWriter
from modelserver.protocol.limits import GrpcLimits, HttpLimits
from modelserver.protocol.response import HttpResponse
from modelserver.repository.options import RepositoryOptions
from modelserver.repository.repository import ModelRepository

ROUNDS = 7
REQUESTS = 4096
INFLIGHT = 32

IDENTITY = """
backend: "identity"
max_batch_size: 32
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

Start = Callable[[], Any]  # makes a request and hands it to its frontend


class Tally:
    """Counts answers; `wanted` of them end `wait`."""

    def __init__(self) -> None:
        self.count = 0
        self._wanted = 0
        self._done: asyncio.Future[None] | None = None

    def add(self) -> None:
        self.count += 1
        if self.count == self._wanted and self._done is not None:
            self._done.set_result(None)

    def take(self, _: Parts) -> bool:
        """As a wire that has room for an answer."""
        self.add()
        return True

    async def wait(self, wanted: int) -> None:
        if self.count < wanted:
            self._wanted = wanted
            self._done = asyncio.get_running_loop().create_future()
            await self._done


class NullExchange(HttpExchange):
    """An HTTP request on no wire."""

    __slots__ = ("_tally",)

    def __init__(self, head: HttpHead, body: bytes, tally: Tally) -> None:
        self.head = head
        self.body = body
        self.on_disconnect = None
        self._tally = tally

    def respond(self, response: HttpResponse) -> None:
        assert response.status == 200, response.body
        self._tally.add()

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        raise AssertionError("an infer call is answered at once")


class NullCall(UnaryCall):
    """A gRPC call on no wire."""

    __slots__ = ("_tally",)

    def __init__(self, message: bytes, metadata: dict[str, str | bytes], tally: Tally) -> None:
        self.message = message
        self.metadata = metadata
        self.deadline_ns = None
        self.on_cancel = None
        self._tally = tally

    def reply(self, parts: Parts) -> None:
        self._tally.add()

    def fail(self, status: int, text: str, retry_ms: int = 0) -> None:
        raise AssertionError(f"{status}: {text}")


def http_case(frontend: HttpFrontend, load: Any, headers: dict[str, str], tally: Tally) -> Start:
    head = HttpHead("POST", load.path, {name.lower(): value for name, value in load.headers.items()} | headers)
    return lambda: frontend.handle(NullExchange(head, load.body, tally))


def grpc_case(frontend: GrpcFrontend, load: Any, headers: dict[str, str], tally: Tally) -> Start:
    unary = frontend.methods[load.path].unary
    assert unary is not None
    metadata: dict[str, str | bytes] = {**headers}
    return lambda: unary(NullCall(load.body, metadata, tally))


async def measure(start: Start, tally: Tally, inflight: int) -> float:
    """The least µs of CPU, of all threads, that a request took in a round."""
    best = float("inf")
    for _ in range(ROUNDS):
        gc.collect()
        began_s = time.process_time()
        for _ in range(REQUESTS // inflight):
            wanted = tally.count + inflight
            for _ in range(inflight):
                start()
            await tally.wait(wanted)
        best = min(best, time.process_time() - began_s)
    return best * 1e6 / REQUESTS


async def measure_stream(method: Method, message: bytes, headers: dict[str, str], inflight: int) -> float:
    """As `measure`, over one ModelStreamInfer call."""
    best = float("inf")
    assert method.stream is not None
    for _ in range(ROUNDS):
        gc.collect()
        tally = Tally()
        began_s = time.process_time()
        call = StreamCall(_messages(message, tally, inflight), _waiting, {**headers}, send_now=tally.take)
        await method.stream(call)
        best = min(best, time.process_time() - began_s)
        assert tally.count == REQUESTS
    return best * 1e6 / REQUESTS


async def _messages(message: bytes, tally: Tally, inflight: int) -> AsyncIterator[bytes]:
    for number in range(REQUESTS):
        if number % inflight == 0:
            await tally.wait(number)
        yield message


async def _waiting(_: Parts) -> None:
    raise AssertionError("there is room all the time")


async def run(repository: ModelRepository, keys: KeyRing | None, headers: dict[str, str]) -> None:
    await repository.start()
    callers = Callers(lambda name: keys.limits_of(name) or NO_LIMITS) if keys is not None else None
    dataplane = DataPlane(repository, ServerMetadata("benchmark", "0", ()), callers=callers)
    http = http_frontend(dataplane, cast("Any", None), HttpLimits(), keys)
    grpc = grpc_frontend(dataplane, cast("Any", None), GrpcLimits(), keys)
    small = np.arange(16, dtype=np.float32).reshape(1, 16)
    digit = np.zeros((1, 64), np.float32)
    infer = grpc.methods[requests.GRPC_INFER]
    stream = grpc.methods[requests.GRPC_INFER.replace("ModelInfer", "ModelStreamInfer")]
    print(f"{'case':<44} {'1 in flight':>12} {f'{INFLIGHT} in flight':>12}   (µs of CPU per request)")
    assert infer.unary is not None
    for title, model, name, data in (
        ("identity, executed in submit", "identity_direct", "INPUT0", small),
        ("identity, turns of the loop", "identity", "INPUT0", small),
        ("digits MLP, worker thread", "mlp", "image", digit),
        ("digits MLP, inline", "mlp_inline", "image", digit),
    ):
        for form, load in (
            ("HTTP binary", requests.http_binary(model, name, data)),
            ("HTTP JSON", requests.http_json(model, name, data)),
            ("gRPC", requests.grpc_raw(model, name, data)),
        ):
            tally = Tally()
            start = grpc_case(grpc, load, headers, tally) if form == "gRPC" else http_case(http, load, headers, tally)
            figures = [await measure(start, tally, inflight) for inflight in (1, INFLIGHT)]
            _print(f"{title}: {form}", figures)
        message = requests.grpc_raw(model, name, data).body
        _print(f"{title}: gRPC stream", [await measure_stream(stream, message, headers, n) for n in (1, INFLIGHT)])
    await repository.stop(5)


def _print(title: str, figures: list[float]) -> None:
    print(f"{title:<44} {figures[0]:>12.2f} {figures[1]:>12.2f}", flush=True)


def _keys(path: Path) -> tuple[KeyRing, dict[str, str]]:
    """A file with one key, and what its owner sends."""
    text, key = create_key("benchmark", frozenset({Scope.INFER}))
    path.write_text(key.line)
    return KeyRing(str(path)), {"authorization": f"Bearer {text}"}


def main() -> None:
    parser = argparse.ArgumentParser(description="µs of CPU per request, without sockets")
    parser.add_argument("--keys", action="store_true", help="each request has an API key")
    has_keys = parser.parse_args().keys
    try:
        import uvloop

        new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    except ImportError:
        new_loop = asyncio.new_event_loop
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name, batching in (("identity_direct", ""), ("identity", "dynamic_batching { }")):
            (root / name / "1").mkdir(parents=True)
            (root / name / "config.pbtxt").write_text(IDENTITY + batching)
        for name in ("mlp", "mlp_inline"):
            models.wide_mlp(root, name, batching=True, width=128)
        with (root / "mlp_inline" / "config.pbtxt").open("a") as config:
            config.write('parameters { key: "inline_execution" value { string_value: "auto" } }')
        options = RepositoryOptions(roots=(root,))
        keys, headers = _keys(root / "keys.yaml") if has_keys else (None, {})
        with asyncio.Runner(loop_factory=new_loop) as runner:
            resources = SharedResources(is_fair=has_keys, is_adaptive=True)
            runner.run(run(ModelRepository(options, resources=resources), keys, headers))


if __name__ == "__main__":
    main()
