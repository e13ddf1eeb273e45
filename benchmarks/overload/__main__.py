"""Goodput from 1 to 10 times the load that a model can take: `python -m benchmarks.overload`.

A model that computes 20 ms, two instances, no batching: 100 answers per second. Clients wait 200 ms for an answer and
tell so (gRPC's deadline, Envoy's header); what comes later is worthless to them. They send at random times and do not
slow down. Goodput is what is answered in time, beside the same with --adaptive-admission=false. Meanwhile another
client asks for the server's health, 50 times per second, whose 99th percentile is given.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.overload.client import GrpcClient, HttpClient, Outcome, offer
from benchmarks.servers.ours import modelserver

CONFIG = """
backend: "identity"
input [ { name: "INPUT0", data_type: TYPE_INT32, dims: [ -1 ] } ]
output [ { name: "OUTPUT0", data_type: TYPE_INT32, dims: [ -1 ] } ]
max_batch_size: 1
instance_group [ { kind: KIND_CPU count: 2 } ]
parameters { key: "execute_delay_ms" value { string_value: "20" } }
"""
CAPACITY = 100.0
DEADLINE_S = 0.2
WARM_S = 1.0
HEALTH_RATE = 50.0


@dataclass(frozen=True, slots=True)
class Row:
    """One run."""

    protocol: str
    factor: float
    is_adaptive: bool
    goodput: float
    refused: float
    late: float
    refusal_ms: float
    health_p99_ms: float
    other: dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--factors", type=float, nargs="+", default=[1, 2, 5, 10], help="loads, times the capacity")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one run (3)")
    options = parser.parse_args()
    rows = [row for is_adaptive in (True, False) for row in measure(options.factors, options.seconds, is_adaptive)]
    print("| | load | answered in time /s | refused at once /s | too late /s | refusal, median | health, p99 |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        name = f"{row.protocol}, admission {'on' if row.is_adaptive else 'off'}"
        print(
            f"| {name} | {row.factor:g}x | {row.goodput:.0f} | {row.refused:.0f} | {row.late:.0f} | "
            f"{row.refusal_ms:.1f} ms | {row.health_p99_ms:.1f} ms |{f' {row.other}' if row.other else ''}"
        )


def measure(factors: Sequence[float], seconds: float, is_adaptive: bool) -> list[Row]:
    """A server for each setting of the flag, so that no run sees what another has left."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "busy"
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(CONFIG)
        flag = f"--adaptive-admission={str(is_adaptive).lower()}"
        with modelserver(Path(directory), flag, "--log-error=false") as server:
            return asyncio.run(_measure(server.ports["http"], server.ports["grpc"], factors, seconds, is_adaptive))


async def _measure(http: int, grpc: int, factors: Sequence[float], seconds: float, is_adaptive: bool) -> list[Row]:
    rows = []
    for protocol, make, port in (("HTTP", HttpClient, http), ("gRPC", GrpcClient, grpc)):
        for factor in factors:
            client = make(port, "busy", DEADLINE_S)
            rate = CAPACITY * factor
            await offer(client.infer, rate=rate, seconds=WARM_S, deadline_s=DEADLINE_S)
            inference = offer(client.infer, rate=rate, seconds=seconds, deadline_s=DEADLINE_S)
            health = offer(client.health, rate=HEALTH_RATE, seconds=seconds, deadline_s=10.0)
            outcome, healthy = await asyncio.gather(inference, health)
            await client.close()
            rows.append(_row(protocol, factor, is_adaptive, outcome, healthy, seconds))
            await asyncio.sleep(0.5)  # what is still queued for nobody is over
    return rows


def _row(protocol: str, factor: float, is_adaptive: bool, outcome: Outcome, healthy: Outcome, seconds: float) -> Row:
    return Row(
        protocol,
        factor,
        is_adaptive,
        goodput=len(outcome.in_time_s) / seconds,
        refused=outcome.num_refused / seconds,
        late=outcome.num_late / seconds,
        refusal_ms=1000 * quantile(outcome.refusal_s, 0.5),
        health_p99_ms=1000 * quantile(healthy.in_time_s, 0.99),
        other=outcome.other,
    )


def quantile(values: Sequence[float], part: float) -> float:
    """0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


if __name__ == "__main__":
    main()
