"""A server under measurement: a child process, its ports, and the CPU time that it and its children used."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path(__file__).parent.parent.parent


@dataclass(slots=True)
class ServerProcess:
    """`ports` are those that were reserved for it, by name (`http`, `grpc`, ...)."""

    name: str
    process: subprocess.Popen[bytes]
    ports: Mapping[str, int]

    def cpu_s(self) -> float:
        """CPU seconds that the server and its living children have used so far (utime + stime)."""
        total = 0.0
        parent = psutil.Process(self.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


@contextlib.contextmanager
def run_server(
    name: str,
    command: Callable[[Mapping[str, int]], Sequence[str]],
    *,
    ports: Sequence[str] = ("http",),
    ready: Callable[[Mapping[str, int]], bool],
    env: Mapping[str, str] | None = None,
    timeout_s: float = 90.0,
) -> Iterator[ServerProcess]:
    """Start `command(ports)`, wait until `ready(ports)`, stop it in the end. Raises SystemExit with its output."""
    numbers = dict(zip(ports, free_ports(len(ports)), strict=True))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command(numbers), stdout=output, stderr=output, cwd=_ROOT, env={**os.environ, **(env or {})}
        )
        try:
            deadline = time.monotonic() + timeout_s
            while not ready(numbers):
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    raise SystemExit(f"{name} did not start:\n{output.read().decode(errors='replace')[-3000:]}")
                time.sleep(0.1)
            yield ServerProcess(name, process, numbers)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server, and what it has started: not every server sees to that itself."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(children, timeout=1)
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def http_ready(path: str = "/v2/health/ready", port: str = "http") -> Callable[[Mapping[str, int]], bool]:
    """Ready when GET `path` answers 200."""

    def check(ports: Mapping[str, int]) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[port]}{path}", timeout=1) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    return check


def port_open(port: str) -> Callable[[Mapping[str, int]], bool]:
    """Ready when a TCP connection is accepted."""

    def check(ports: Mapping[str, int]) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", ports[port])) == 0

    return check
