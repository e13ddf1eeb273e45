"""The Python backend against real Triton's: the same model.py on both, in one run."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from benchmarks import models, requests
from benchmarks.cases import Settings
from benchmarks.report import Report
from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess
from benchmarks.servers.triton import triton
from benchmarks.wire_cases import measure_in_turn

_SIZES = {"[1,16]": 16, "1 MiB": 1 << 18}
_CONCURRENCIES = (1, 8, 32)


def python_backend(settings: Settings, report: Report) -> None:
    """The same model.py, identity FP32, on our Python backend and on real Triton's, one instance each."""
    repository = settings.repository("models")
    models.python_identity(repository)

    def servers(stack: ExitStack) -> list[ServerProcess]:
        return [stack.enter_context(modelserver(repository)), stack.enter_context(triton(repository))]

    for size, count in _SIZES.items():
        data = np.zeros((1, count), dtype=np.float32)
        loads = {
            "http": requests.http_binary("identity_py", "INPUT0", data),
            "grpc": requests.grpc_raw("identity_py", "INPUT0", data),
        }
        for port, load in loads.items():
            for concurrency in _CONCURRENCIES:
                rows = measure_in_turn(settings, report, f"g {port} {size}", servers, load, concurrency, port)
                ratio = rows["modelserver"].per_second / rows["triton"].per_second
                what = f"Python model throughput / Triton, {port} {size} c{concurrency}"
                report.at_least("g", what, ratio, 1.0)
