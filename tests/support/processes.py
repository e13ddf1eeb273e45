"""`modelserver serve` as a process of its own, for what only a process shows: signals, exit codes, what is printed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from support.layouts import layout_options

ANY_PORTS = (
    "--http-port=0",
    "--grpc-port=0",
    "--metrics-port=0",
    "--http-address=127.0.0.1",
    "--grpc-address=127.0.0.1",
)
SERVE = (sys.executable, "-m", "modelserver.cli.main", "serve")
# Variables of the machine that runs the tests must not become options.
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("MODELSERVER_")}


class ServerProcess:
    """A started process, and what it has printed so far on both streams."""

    def __init__(self, arguments: Sequence[str], *, command: Sequence[str] = SERVE) -> None:
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, name="server-output")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """The first match of `pattern` in the output. Fails when the process ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            has_ended = not self._reader.is_alive()
            match = re.search(pattern, self.output, re.MULTILINE)
            if match is not None:
                return match
            assert not has_ended, f"the server ended without printing {pattern!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {pattern!r} within {timeout_s} s:\n{self.output}"
            time.sleep(0.01)

    def wait_until_started(self) -> None:
        self.wait_for(r"^metrics +http")

    def port(self, name: str) -> int:
        """The port of HTTP, gRPC or metrics, as the server printed it."""
        return int(self.wait_for(rf"^{name} +\S+:(\d+)")[1])

    @property
    def http_url(self) -> str:
        return f"127.0.0.1:{self.port('HTTP')}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.port('gRPC')}"

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit status; what was printed is complete then."""
        status = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()


def start_serving(repository: Path, *arguments: str, before: Sequence[str] = ()) -> ServerProcess:
    """A server over `repository` on free ports, in the layout of the test; the caller closes it.

    `before` stands before the command: a program that changes what it runs under.
    """
    layout = [f"--{name.replace('_', '-')}={value}" for name, value in layout_options().items()]
    words = [f"--model-repository={repository}", *ANY_PORTS, *layout, *arguments]
    return ServerProcess(words, command=(*before, *SERVE))


@contextmanager
def serving_process(repository: Path, *arguments: str, before: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """As `start_serving`; killed at the end if it still runs."""
    server = start_serving(repository, *arguments, before=before)
    try:
        yield server
    finally:
        server.close()
