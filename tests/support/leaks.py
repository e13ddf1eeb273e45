"""What a test run must not leave behind: threads, child processes, listening sockets, shared memory, memfds."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

SETTLE_S = 30.0
# How the project's tests and Python's libraries name shared memory. Files of other names may be anybody's.
SHARED_MEMORY = ("modelserver", "psm_", "torch_", "sem.")
# Threads that live as long as the process by design of the library that starts them.
PERMANENT_THREADS = ("grpc", "pymp", "fsspecIO", "asyncio_", "Dummy", "Hub", "ThreadPoolExecutor", "pytest")


@dataclass(frozen=True)
class Holdings:
    """What the process holds now, each by a name that says what it is."""

    threads: frozenset[str]
    children: frozenset[str]
    sockets: frozenset[str]
    shared_memory: frozenset[str]
    memfds: int

    def beyond(self, before: Holdings) -> list[str]:
        """What is here and was not there before."""
        new = [
            *(f"thread {name}" for name in self.threads - before.threads),
            *(f"child process {name}" for name in self.children - before.children),
            *(f"listening socket {name}" for name in self.sockets - before.sockets),
            *(f"/dev/shm/{name}" for name in self.shared_memory - before.shared_memory if not _is_used_elsewhere(name)),
        ]
        if self.memfds > before.memfds:
            new.append(f"{self.memfds - before.memfds} open memfds")
        return sorted(new)


def holdings() -> Holdings:
    process = psutil.Process()
    return Holdings(
        threads=frozenset(
            f"{thread.name}" for thread in threading.enumerate() if not thread.name.startswith(PERMANENT_THREADS)
        ),
        children=frozenset(f"{child.pid} {_command(child)}" for child in process.children(recursive=True)),
        sockets=frozenset(
            f"{connection.laddr.ip}:{connection.laddr.port}"
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ),
        shared_memory=frozenset(
            path.name for path in Path("/dev/shm").glob("*") if path.name.startswith(SHARED_MEMORY)
        ),
        memfds=_count_memfds(),
    )


@contextmanager
def no_leaks(settle_s: float = SETTLE_S) -> Iterator[None]:
    """Fail if the block leaves something behind; what is still ending is given `settle_s`."""
    before = holdings()
    yield
    deadline = time.monotonic() + settle_s
    while (left := holdings().beyond(before)) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert not left, f"left behind: {', '.join(left)}"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.Error:
        return "(gone)"


def _is_used_elsewhere(name: str) -> bool:
    """Whether a process that is not one of ours maps the file: a test that runs beside this one, or a stranger."""
    this = psutil.Process()
    ours = {this.pid, *(child.pid for child in this.children(recursive=True))}
    for process in psutil.process_iter():
        try:
            if process.pid not in ours and f"/dev/shm/{name}" in Path(f"/proc/{process.pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False


def _count_memfds() -> int:
    count = 0
    for link in Path("/proc/self/fd").glob("*"):
        try:
            count += "/memfd:" in str(link.readlink())
        except OSError:
            continue
    return count
