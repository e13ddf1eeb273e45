"""What the hop from a wire process to the core costs: `python -m benchmarks.front_hop` prints CPU µs per request.

One process asks as a front does, by gRPC calls on no wire, another answers as the core does, with what it was sent. The
CPU of both is given, and that of one process that does it all: the difference is the hop. Sockets of clients, HTTP/2
and models are not part of it.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import uvloop

from benchmarks import requests
from modelserver.app.frontends import grpc_frontend
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.frontends.grpc.frontend import GrpcFrontend
from modelserver.protocol.call import Parts, UnaryCall
from modelserver.protocol.kserve import INFER_PATH
from modelserver.protocol.limits import GrpcLimits, HttpLimits
from modelserver.wire.processes.front_frontends import Core
from modelserver.wire.processes.session import FrontSession
from modelserver.wire.processes.setup import CorePlanes, FrontCalls, FrontSockets

Ask = Callable[[UnaryCall], None]

# Elements of an FP32 tensor, requests in flight, requests.
CASES = ((16, 1, 20_000), (16, 8, 50_000), (16, 32, 100_000), (2048, 32, 50_000), (1 << 18, 4, 2_000))
NUM_ROUNDS = 3


def main() -> None:
    columns = ("bytes", "in flight", "front µs", "core µs", "alone µs", "hop µs")
    print(" ".join(f"{column:>9}" for column in columns))
    for size, num_inflight, count in CASES:
        alone = min(uvloop.run(measure_alone(size, num_inflight, count)) for _ in range(NUM_ROUNDS))
        front, core = min((measure(size, num_inflight, count) for _ in range(NUM_ROUNDS)), key=sum)
        figures = (front, core, alone, front + core - alone)
        print(f"{size * 4:>9} {num_inflight:>9} " + " ".join(f"{figure:>9.1f}" for figure in figures))


def measure(size: int, num_inflight: int, count: int) -> tuple[float, float]:
    """CPU µs per request of the front and of the core."""
    sockets = FrontSockets("front")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        link, handover, outgoing, incoming = map(os.dup, sockets.descriptors)
        os.close(handover)
        sockets.close()
        spent = uvloop.run(ask_over((link, outgoing, incoming), size, num_inflight, count))
        os.write(writing, str(spent).encode())
        os._exit(0)
    sockets.close_theirs()
    core_us = uvloop.run(serve(sockets)) / count
    os.waitpid(pid, 0)
    front_us = float(os.read(reading, 100))
    os.close(reading)
    os.close(writing)
    return front_us, core_us


async def serve(sockets: FrontSockets) -> float:
    """The core: CPU µs until the front hangs up."""
    done = asyncio.Event()
    dataplane: Any = Echo()
    planes = CorePlanes(dataplane, None, frontend_over(dataplane))
    session = FrontSession("front", sockets, planes, counts=(), lost=lambda _: done.set())
    before = spent_us()
    await done.wait()
    after = spent_us()
    session.close()
    return after - before


async def ask_over(descriptors: tuple[int, int, int], size: int, num_inflight: int, count: int) -> float:
    """The front: CPU µs per request."""
    core = Core(descriptors, HttpLimits(), GrpcLimits(), FrontCalls(), drain=lambda _: None)
    spent = await ask(infer_of(core.grpc), size, num_inflight, count)
    core.link.close()
    return spent


async def measure_alone(size: int, num_inflight: int, count: int) -> float:
    """CPU µs per request of one process that needs no hop."""
    return await ask(infer_of(frontend_over(Echo())), size, num_inflight, count)


async def ask(infer: Ask, size: int, num_inflight: int, count: int) -> float:
    """CPU µs for each of `count` requests: `num_inflight` are made together when the last ones are answered."""
    loop = asyncio.get_running_loop()
    message = requests.grpc_raw("echo", "INPUT", np.ones((1, size), np.float32)).body
    done = asyncio.Event()
    num_left = count
    num_waiting = 0

    def answered() -> None:
        nonlocal num_left, num_waiting
        num_left -= 1
        num_waiting -= 1
        if num_left <= 0:
            done.set()
        elif num_waiting == 0:
            loop.call_soon(send)

    def send() -> None:
        nonlocal num_waiting
        num_waiting = num_inflight
        for _ in range(num_inflight):
            infer(NullCall(message, answered))

    before = spent_us()
    send()
    await done.wait()
    return (spent_us() - before) / count


class NullCall(UnaryCall):
    """A gRPC call on no wire."""

    __slots__ = ("_answered",)

    def __init__(self, message: bytes, answered: Callable[[], None]) -> None:
        self.message = message
        self.metadata = {}
        self.deadline_ns = None
        self.on_cancel = None
        self._answered = answered

    def reply(self, parts: Parts) -> None:
        self._answered()

    def fail(self, status: int, text: str, retry_ms: int = 0) -> None:
        raise AssertionError(f"{status}: {text}")


class Echo:
    """A data plane whose only model answers at once with what it was sent."""

    def infer(self, request: InFlightRequest) -> None:
        request.version = 1
        tensor = request.inputs["INPUT"]
        request.stream.deliver(InferResponse([Tensor("OUTPUT", tensor.datatype, tensor.data)]))


def frontend_over(dataplane: Any) -> GrpcFrontend:
    planes: Any = dataplane
    return grpc_frontend(planes, planes)


def infer_of(frontend: Any) -> Ask:
    infer: Ask = frontend.methods[INFER_PATH].unary
    return infer


def spent_us() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1e6


if __name__ == "__main__":
    main()
