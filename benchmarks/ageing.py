"""Whether calls fail while connections are told to leave: `python -m benchmarks.ageing` ends with an error if one does.

Eight channels of grpcio (the C core), then eight of grpc-go with a deadline for each call, ask without a pause a server
that bears no connection longer than two seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import models, requests
from benchmarks.load import run_load
from benchmarks.load_go import run_go
from benchmarks.load_tools import check
from benchmarks.servers.ours import modelserver
from benchmarks.servers.process import ServerProcess

AGE_MS = 2000
NUM_CONNECTIONS = 8
_OPENED = 'modelserver_connections_total{protocol="http2"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="under load, with each client (15)")
    arguments = parser.parse_args()
    small = requests.grpc_raw("identity", "INPUT0", np.arange(16, dtype=np.float32).reshape(1, 16))
    load = replace(small.at(32, seconds=arguments.seconds), max_connections=NUM_CONNECTIONS, warmup_s=0.0)
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch)
        models.identity(repository)
        with modelserver(repository, f"--grpc-max-connection-age={AGE_MS}") as server:
            check(load, server.ports["grpc"])
            for client, run in {"C core": run_load, "grpc-go": run_go}.items():
                before = opened(server)
                result = run(load, server.ports["grpc"])  # ends the program when a call failed
                print(
                    f"{client:8} {result.per_second:8.0f} calls/s, {result.count} in all, none failed; "
                    f"{opened(server) - before} connections for {NUM_CONNECTIONS} channels"
                )


def opened(server: ServerProcess) -> int:
    """HTTP/2 connections that the server has accepted so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['metrics']}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(_OPENED))


if __name__ == "__main__":
    main()
