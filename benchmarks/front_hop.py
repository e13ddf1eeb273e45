"""What the hop from a wire process to the core costs: `python -m benchmarks.front_hop` prints CPU µs per request.

One process asks as a front does, another answers as the core does, with what it was sent. The CPU of both is given,
with the making of the request; sockets, HTTP and models are not part of it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import uvloop

from modelserver.core.datatype import Datatype
from modelserver.core.request import InferRequest, RequestForm
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.execution.shared_buffer import SharedBuffer
from modelserver.wire.processes.inference import RemoteRequests
from modelserver.wire.processes.link import Link
from modelserver.wire.processes.messages import CoreBundle, FrontBundle
from modelserver.wire.processes.remote import RemoteDataPlane

# Elements of an FP32 tensor, requests in flight, requests.
CASES = ((16, 1, 20_000), (16, 8, 50_000), (16, 32, 100_000), (1024, 32, 50_000), (1 << 18, 4, 2_000))
NUM_ROUNDS = 3


def main() -> None:
    print(f"{'bytes':>9} {'in flight':>10} {'front µs':>9} {'core µs':>9} {'both µs':>9}")
    for size, num_inflight, count in CASES:
        front, core = min((measure(size, num_inflight, count) for _ in range(NUM_ROUNDS)), key=sum)
        print(f"{size * 4:>9} {num_inflight:>10} {front:>9.1f} {core:>9.1f} {front + core:>9.1f}")


def measure(size: int, num_inflight: int, count: int) -> tuple[float, float]:
    """CPU µs per request of the front and of the core."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests, answers = SharedBuffer.create("requests"), SharedBuffer.create("answers")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.write(writing, str(uvloop.run(serve(theirs, answers, requests)) / count).encode())
        os._exit(0)
    theirs.close()
    front_us = uvloop.run(ask(ours, requests, answers, size, num_inflight, count)) / count
    os.waitpid(pid, 0)
    core_us = float(os.read(reading, 100))
    os.close(reading)
    os.close(writing)
    return front_us, core_us


async def ask(
    connection: socket.socket,
    outgoing: SharedBuffer,
    incoming: SharedBuffer,
    size: int,
    num_inflight: int,
    count: int,
) -> float:
    """The front: CPU µs for `count` requests, of which `num_inflight` are under way at any time."""
    done = asyncio.Event()
    link = Link(
        "core",
        connection,
        outgoing,
        incoming,
        kind=CoreBundle,
        receive=lambda messages: receive(messages),
        lost=done.set,
    )
    dataplane = RemoteDataPlane(link, itertools.count(1))
    data, form = np.ones((1, size), np.float32), RequestForm()
    num_left = count

    def receive(messages: Sequence[Any]) -> None:
        for message in messages:
            dataplane.on_inferred(message)

    def send() -> None:
        request = InferRequest("echo", None, {"INPUT": Tensor("INPUT", Datatype.FP32, data)}, form=form)
        dataplane.infer(request).subscribe(on_response)

    def on_response(_response: InferResponse) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left >= num_inflight:
            send()
        elif num_left == 0:
            done.set()

    before = spent_us()
    for _ in range(num_inflight):
        send()
    await done.wait()
    after = spent_us()
    link.close()
    return after - before


async def serve(connection: socket.socket, outgoing: SharedBuffer, incoming: SharedBuffer) -> float:
    """The core: CPU µs until the front hangs up."""
    done = asyncio.Event()

    def receive(messages: Sequence[Any]) -> None:
        for message in messages:
            requests.infer(message)

    link = Link("front", connection, outgoing, incoming, kind=FrontBundle, receive=receive, lost=done.set)
    dataplane: Any = Echo()
    requests = RemoteRequests(dataplane, link)
    before = spent_us()
    await done.wait()
    return spent_us() - before


class Echo:
    """A data plane whose only model answers at once with what it was sent."""

    def infer(self, request: InferRequest) -> None:
        request.version = 1
        tensor = request.inputs["INPUT"]
        request.stream.deliver(InferResponse([Tensor("OUTPUT", tensor.datatype, tensor.data)]))


def spent_us() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return (usage.ru_utime + usage.ru_stime) * 1e6


if __name__ == "__main__":
    main()
