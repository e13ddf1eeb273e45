"""gRPC as its usual clients speak it: a deadline of its own for each call, large frames, many small ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from benchmarks import models, requests
from benchmarks.cases import Settings
from benchmarks.load import Load, LoadResult, run_load
from benchmarks.load_go import run_go
from benchmarks.report import Report, measure
from benchmarks.servers.ours import modelserver

_SMALL = np.arange(16, dtype=np.float32).reshape(1, 16)
_MIB = np.zeros((1, 1 << 18), dtype=np.float32)
_CONCURRENCY = 32


def foreign_clients(settings: Settings, report: Report) -> None:
    """gRPC identity FP32 [1,16] asked by grpc-go with deadlines and by grpcio (the C core), on both wires."""
    small = requests.grpc_raw("identity", "INPUT0", _SMALL).at(_CONCURRENCY, seconds=settings.seconds)
    clients: dict[str, tuple[Callable[[Load, int], LoadResult], float]] = {
        "grpc-go, a deadline each": (run_go, 18.0),
        "C core": (run_load, 30.0),
    }
    repository = settings.repository("models")
    models.identity(repository, batching=False)
    with ExitStack() as stack:
        ours = stack.enter_context(modelserver(repository))
        reference = stack.enter_context(modelserver(repository, "--wire=grpcio", name="grpcio wire"))
        for client, (run, limit_us) in clients.items():
            loads = [(ours, small), (reference, small)]
            rows = measure(f"m {client}", loads, rounds=settings.rounds, port="grpc", run=run)
            report.add(rows)
            at = f"{client}, c{_CONCURRENCY}"
            report.at_most("m", f"{at}: CPU us per request", rows[0].cpu_us, limit_us)
            report.at_least("m", f"{at}: the grpcio wire's CPU / ours", rows[1].cpu_us / rows[0].cpu_us, 1.0)
        large = requests.grpc_raw("identity", "INPUT0", _MIB).at(1, seconds=settings.seconds)
        loads = [(ours, large), (reference, large)]
        rows = measure("m 1 MiB, C core", loads, rounds=settings.rounds, port="grpc", run=run_load)
        report.add(rows)
        # The C core sends frames as large as it may: up to 1 MiB.
        report.at_most("m", "gRPC 1 MiB in large frames, c1: CPU ms per request", rows[0].cpu_us / 1000, 0.6)
