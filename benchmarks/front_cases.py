"""What fronts cost: the whole server with two wire processes, against one that has none."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from benchmarks import models, requests
from benchmarks.cases import Settings
from benchmarks.load_tools import check, run_tool
from benchmarks.report import Report, measure
from benchmarks.servers.ours import modelserver

_SMALL = np.arange(16, dtype=np.float32).reshape(1, 16)
_CONCURRENCY = 32


def wire_processes(settings: Settings, report: Report) -> None:
    """gRPC and HTTP identity FP32 [1,16] at c32 through --wire-processes=2, against one process."""
    repository = settings.repository("models")
    models.identity(repository, batching=False)
    loads = {
        "grpc": requests.grpc_raw("identity", "INPUT0", _SMALL),
        "http": requests.http_binary("identity", "INPUT0", _SMALL),
    }
    with ExitStack() as stack:
        servers = [
            stack.enter_context(modelserver(repository, name="one process")),
            stack.enter_context(modelserver(repository, "--wire-processes=2", name="two fronts")),
        ]
        for port, load in loads.items():
            timed = replace(load.at(_CONCURRENCY, seconds=settings.seconds), warmup_s=0.0)
            for server in servers:
                check(load, server.ports[port])
                run_tool(timed.at(_CONCURRENCY, seconds=1), server.ports[port])
            pairs = [(server, timed) for server in servers]
            rows = measure(f"p {port}", pairs, rounds=settings.rounds, port=port, run=run_tool)
            report.add(rows)
            what = f"{port} identity, c{_CONCURRENCY}: CPU us per request that two fronts add"
            report.at_most("p", what, rows[1].cpu_us - rows[0].cpu_us, 5.0)
