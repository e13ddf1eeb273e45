"""What TLS costs: the same requests with it and without, on a certificate made for the run."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import models, requests
from benchmarks.cases import Settings
from benchmarks.load import Load
from benchmarks.load_tools import check, run_tool
from benchmarks.report import Measurement, Report, measure
from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess

_SMALL = np.arange(16, dtype=np.float32).reshape(1, 16)
_MIB = np.zeros((1, 1 << 18), dtype=np.float32)


def tls(settings: Settings, report: Report) -> None:
    """TLS against none: identity FP32 [1,16] at c32 and 1 MiB at c1, over gRPC and HTTP binary."""
    repository = settings.repository("models")
    models.identity(repository, batching=False)
    with ExitStack() as stack:
        plain = stack.enter_context(modelserver(repository, name="plain"))
        secured = stack.enter_context(
            modelserver(repository, *_tls_flags(settings.scratch), name="TLS", is_secured=True)
        )
        for size, data, concurrency, limit_us in (("[1,16]", _SMALL, 32, 16.0), ("1 MiB", _MIB, 1, 2200.0)):
            loads = {
                "grpc": requests.grpc_raw("identity", "INPUT0", data),
                "http": requests.http_binary("identity", "INPUT0", data),
            }
            for port, load in loads.items():
                check(load, plain.ports[port])
                rows = _pair(settings, f"n {port} {size}", plain, secured, load.at(concurrency), port)
                report.add(rows)
                what = f"{port} {size} over TLS, c{concurrency}: CPU us per request"
                report.at_most("n", what, rows[1].cpu_us, limit_us)


def _pair(
    settings: Settings, case: str, plain: ServerProcess, secured: ServerProcess, load: Load, port: str
) -> list[Measurement]:
    timed = replace(load, seconds=settings.seconds, warmup_s=0.0)
    loads = [(plain, timed), (secured, replace(timed, is_tls=True))]
    for server, warming in loads:
        run_tool(warming.at(load.concurrency, seconds=1), server.ports[port])
    return measure(case, loads, rounds=settings.rounds, port=port, run=run_tool)


def _tls_flags(directory: Path) -> Sequence[str]:
    """A certificate for two days that nobody has signed (P-256), and the flags that name it."""
    certificate, key = directory / "server.crt", directory / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-subj", "/CN=localhost", "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"openssl made no certificate:\n{done.stderr[-2000:]}")
    return (f"--tls-cert={certificate}", f"--tls-key={key}")
