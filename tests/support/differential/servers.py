"""Both servers over the same repository: ours in this process, the real Triton by a launcher.

The launcher is the program that MODELSERVER_TRITON names; it is called with the repository, the ports of HTTP,
gRPC and metrics, the mode of model control and further flags, and runs tritonserver on 127.0.0.1 until it is
told to end.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.differential.target import Target
from support.layouts import free_port
from support.serving import running_server
from support.tools import tool

LAUNCHER = "triton-launcher"
START_TIMEOUT_S = 300.0


@contextmanager
def triton(repository: Path, log: Path, *, mode: str = "none", flags: tuple[str, ...] = ()) -> Iterator[Target]:
    """The real Triton, started and live; what it logs is in `log`."""
    ports = [free_port() for _ in range(3)]
    prefix = f"differential{os.getpid()}_"
    regions = f"--backend-config=python,shm-region-prefix-name={prefix}"
    command = [tool(LAUNCHER), str(repository), *map(str, ports), mode, *flags, regions]
    with log.open("wb") as output:
        # A group of its own: its stubs end with it.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_until_ready(process, ports[0], log)
            with Target(is_triton=True, http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2]) as target:
                yield target
        finally:
            _end(process)
            # Stubs that ended by a fault leave theirs.
            for region in Path("/dev/shm").glob(f"{prefix}*"):
                region.unlink()


@contextmanager
def ours(
    repository: Path | Sequence[Path], *, mode: str = "none", options: Mapping[str, Any] | None = None
) -> Iterator[Target]:
    """Our server, in a thread of this process."""
    with running_server(repository, id="triton", model_control_mode=mode, **(options or {})) as running:
        urls = {"http_port": running.http_url, "grpc_port": running.grpc_url, "metrics_port": running.metrics_url}
        ports = {name: int(url.rpartition(":")[2]) for name, url in urls.items()}
        with Target(is_triton=False, **ports) as target:
            yield target


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _is_ready(port):
        assert process.poll() is None, f"Triton ended with {process.returncode}:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"Triton was not ready in time:\n{log.read_text()[-4000:]}"
        time.sleep(0.2)


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
