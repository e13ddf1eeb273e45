"""Large tensors: the memory that requests in flight take, and 256k numbers of JSON there and back."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import psutil

from benchmarks import models, requests
from benchmarks.cases import Settings
from benchmarks.load_tools import check, run_tool
from benchmarks.report import Report
from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess
from benchmarks.wire_cases import measure_in_turn, ours_and_triton

_MIB = 1 << 20
_NUMBERS = np.random.default_rng(0).random((1, 1 << 18), dtype=np.float32)
_NUM_INFLIGHT = 32


def memory_and_json(settings: Settings, report: Report) -> None:
    """Peak memory with 32 requests of 1 MiB in flight; 256k numbers of JSON, against Triton C++."""
    repository = settings.repository("models")
    models.identity(repository, batching=False)
    loads = {
        "HTTP": requests.http_binary("identity", "INPUT0", _NUMBERS),
        "gRPC": requests.grpc_raw("identity", "INPUT0", _NUMBERS),
    }
    for protocol, load in loads.items():
        # A new server for each: what the allocator keeps of one would hide the other.
        with modelserver(repository) as server:
            port = server.ports[protocol.lower()]
            check(requests.http_binary("identity", "INPUT0", _NUMBERS[:, :16]), server.ports["http"])
            idle = psutil.Process(server.process.pid).memory_info().rss
            run_tool(load.at(_NUM_INFLIGHT, seconds=settings.seconds), port)
            grown_mib = (_peak_bytes(server) - idle) / _MIB
        what = f"{protocol} 1 MiB, c{_NUM_INFLIGHT}: MiB at the peak over the idle server's"
        report.at_most("o", what, grown_mib, 100.0)
    json = requests.http_json("identity", "INPUT0", _NUMBERS)
    rows = measure_in_turn(settings, report, "o JSON", partial(ours_and_triton, settings), json, 1, "http")
    ours, peer = rows["modelserver"], rows["triton"]
    report.at_most("o", "JSON of 256k numbers, c1: CPU ms per request", ours.cpu_us / 1000, 20.0)
    report.at_most("o", "JSON of 256k numbers, c1: CPU / Triton C++", ours.cpu_us / peer.cpu_us, 0.5)


def _peak_bytes(server: ServerProcess) -> int:
    """The most memory that the server's process has ever had."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
