"""modelserver over a model repository, and over one model of it alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.servers.process import ServerProcess, http_ready, port_open, run_server


def modelserver(
    repository: Path,
    *flags: str,
    name: str = "modelserver",
    python: str = sys.executable,
    is_secured: bool = False,
) -> AbstractContextManager[ServerProcess]:
    """`modelserver serve` on free ports, loading only what `flags` say; `is_secured` where they ask for TLS.

    `python` is the interpreter whose installation is served.
    """

    def command(ports: Mapping[str, int]) -> Sequence[str]:
        return [
            python,
            "-P",
            "-m",
            "modelserver",
            "serve",
            f"--model-repository={repository}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--metrics-address=127.0.0.1",
            f"--http-port={ports['http']}",
            f"--grpc-port={ports['grpc']}",
            f"--metrics-port={ports['metrics']}",
            *(("--listen-when-ready",) if is_secured else ()),
            *flags,
        ]

    # Where a certificate would be in the way of asking, ports that open late say that models are ready.
    ready = port_open("grpc") if is_secured else http_ready()
    return run_server(name, command, ports=("http", "grpc", "metrics"), ready=ready)
