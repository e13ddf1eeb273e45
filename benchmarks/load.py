"""What to send, and what came of it: jobs for the load programs and their results."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of one request. `protocol` is http or grpc; `path` a URL path or a full method name.

    `concurrency` calls are spread over so many connections in gRPC; HTTP has one for each. `is_tls`: by h2load and wrk.
    """

    protocol: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    concurrency: int = 1
    seconds: float = 3.0
    warmup_s: float = 0.5
    max_connections: int = 4
    is_tls: bool = False

    @property
    def num_connections(self) -> int:
        return min(self.max_connections, self.concurrency)

    def at(self, concurrency: int, *, seconds: float | None = None) -> Load:
        return replace(self, concurrency=concurrency, seconds=seconds or self.seconds)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Answers counted after the warm-up; latencies in microseconds."""

    count: int
    failed: int
    seconds: float
    p50_us: float
    p99_us: float

    @property
    def per_second(self) -> float:
        return self.count / self.seconds if self.seconds > 0 else 0.0


def summarise(latencies: list[float], failed: int, seconds: float) -> dict[str, float]:
    """The fields of a `LoadResult`, from latencies in seconds."""
    ordered = sorted(latencies)

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e6 if ordered else 0.0

    return {
        "count": len(ordered),
        "failed": failed,
        "seconds": seconds,
        "p50_us": percentile(0.50),
        "p99_us": percentile(0.99),
    }


def run_load(load: Load, port: int, program: Sequence[str] = ()) -> LoadResult:
    """Run the load in a process of its own against 127.0.0.1:`port`; raises SystemExit if a request failed.

    `program` is a load program in another language; without it, ours for the protocol.
    """
    job = {
        "path": load.path,
        "body": base64.b64encode(load.body).decode(),
        "headers": load.headers,
        "concurrency": load.concurrency,
        "connections": load.num_connections,
        "seconds": load.seconds,
        "warmup_s": load.warmup_s,
        "port": port,
    }
    done = subprocess.run(
        program or [sys.executable, "-m", f"benchmarks.load_{load.protocol}"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=_ROOT,
        timeout=load.seconds + load.warmup_s + 60,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"the load program failed:\n{done.stderr[-2000:]}")
    result = LoadResult(**json.loads(done.stdout))
    if result.failed or not result.count:
        raise SystemExit(
            f"{result.failed} of {result.failed + result.count} requests failed: {load.protocol} {load.path}\n"
            f"{done.stderr[-2000:]}"
        )
    return result
