"""When calls are told that their time is over: `python -m benchmarks.deadlines` prints milliseconds after the call.

Calls with `grpc-timeout: 100m` ask a model that takes 300 ms: on an idle server, beside 10,000 requests a second, and
beside 200 connections that keep the server busy. No call may be told before its time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.models import identity
from benchmarks.servers.ours import modelserver
from modelserver.client.address import Address
from modelserver.client.grpc_lane import GrpcLane
from modelserver.client.grpc_messages import frame
from modelserver.client.grpc_pool import GrpcPool
from modelserver.client.heads import GrpcRequestHead
from modelserver.client.lane import Lane
from modelserver.pb import grpc_service_pb2 as pb

TIMEOUT_MS = 100
# Flags of the bench, which makes the load beside the calls.
LOADS: dict[str, Sequence[str]] = {
    "alone": (),
    "10,000 requests/s": ("--request-rate-range", "10000"),
    "200 busy connections": ("--concurrency-range", "200", "--streams-per-connection", "1"),
}
_SLOW = """
backend: "identity"
parameters { key: "execute_delay_ms" value { string_value: "300" } }
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


class Ends:
    """Waits for the end of a call."""

    def __init__(self) -> None:
        self._ended: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        self._ended.put_nowait((now_ns - lane.start_ns, failure))

    def responded(self, lane: Lane) -> None:
        """Calls have one response."""

    async def next_ms(self) -> float:
        took_ns, failure = await self._ended.get()
        if not (failure or "").startswith("DEADLINE_EXCEEDED"):
            raise SystemExit(f"expected DEADLINE_EXCEEDED, got {failure or 'an answer'}")
        return took_ns / 1e6


def request() -> bytes:
    asked = pb.ModelInferRequest(model_name="slow")
    asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1])
    asked.raw_input_contents.append(np.zeros(1, np.float32).tobytes())
    return frame(asked.SerializeToString())


async def ask(port: int, num_calls: int) -> list[float]:
    """The milliseconds after which each of the calls, one after the other, was told."""
    address = Address("127.0.0.1", port)
    fields = GrpcRequestHead(address, "ModelInfer", {"grpc-timeout": f"{TIMEOUT_MS}m"}).fields
    pool = GrpcPool(address, fields=fields)
    await pool.prepare()
    ends = Ends()
    lane = GrpcLane(pool, ends)
    took_ms = []
    for _ in range(num_calls):
        lane.send(request())
        took_ms.append(await ends.next_ms())
    pool.abandon()
    return took_ms


@contextmanager
def load(port: int, flags: Sequence[str]) -> Iterator[None]:
    """Requests to the identity model meanwhile."""
    if not flags:
        yield
        return
    command = (sys.executable, "-m", "modelserver", "bench", "-m", "identity", "-i", "grpc", "--shape", "INPUT0:16")
    process = subprocess.Popen(
        [*command, "-u", f"127.0.0.1:{port}", "-v", "-p", "500", "-r", "1000", "-s", "0.001", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None, "it is a pipe"
        # With its first window the load is at its full height.
        if not any("Pass [1]" in line for line in process.stdout):
            raise SystemExit("the load ended before it began")
        yield
    finally:
        process.terminate()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=80)
    arguments = parser.parse_args()
    print(f"{'beside':22} {'median':>7} {'most':>7}")
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch)
        identity(repository)
        (repository / "slow" / "1").mkdir(parents=True)
        (repository / "slow" / "config.pbtxt").write_text(_SLOW)
        with modelserver(repository) as server:
            for name, flags in LOADS.items():
                port = server.ports["grpc"]
                with load(port, flags):
                    took_ms = asyncio.run(ask(port, arguments.calls))
                print(f"{name:22} {statistics.median(took_ms):7.1f} {max(took_ms):7.1f}")
                if min(took_ms) < TIMEOUT_MS:
                    raise SystemExit(f"a call was told {TIMEOUT_MS - min(took_ms):.2f} ms before its time")


if __name__ == "__main__":
    main()
