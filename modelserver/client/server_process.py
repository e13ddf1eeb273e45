"""`modelserver serve` or `route` as a child of this process: its ports, its output, and its end, never after ours."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

# The lines of the ports in what `modelserver serve` prints when it is ready.
_ADDRESS = re.compile(r"^(http|grpc) +(?:http://)?(\S+:\d+)\s*$", re.IGNORECASE)
_PR_SET_PDEATHSIG = 1
_NUM_KEPT = 2000


class ServerProcess:
    """Started at once. The thread that makes it must live as long as the server should: when it ends, or when this
    process is killed, the kernel sends `death_signal` to the server."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        command: str = "serve",
        environment: Mapping[str, str] | None = None,
        death_signal: signal.Signals = signal.SIGKILL,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """`words` follow `modelserver serve`, or another `command`; `on_line` is called in another thread with each
        line that it prints."""
        self._lines: deque[str] = deque(maxlen=_NUM_KEPT)
        # By protocol, as soon as the server has printed them: "http", "grpc".
        self.addresses: dict[str, str] = {}
        self._on_line = on_line
        libc, parent = ctypes.CDLL(None), os.getpid()

        def die_with_parent() -> None:
            with suppress(OSError, AttributeError):
                libc.prctl(_PR_SET_PDEATHSIG, death_signal)
            if os.getppid() != parent:  # it died before the kernel was told
                os._exit(1)

        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-m", "modelserver", command, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=None if environment is None else dict(environment),
            # Ctrl-C is for us: the server goes when we have no more use for it.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._reader = threading.Thread(target=self._read, name="server-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    def tail(self, num_lines: int) -> list[str]:
        """The newest lines of its output."""
        lines = list(self._lines.copy())
        return lines[-num_lines:] if num_lines else []

    def terminate(self) -> None:
        """Ask it to finish what it has, and to end."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def stop(self, grace_s: float) -> None:
        """Return when it has ended: by itself within `grace_s`, else by force."""
        self.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self.close()

    def close(self) -> None:
        """Return when it has ended, and its output is read."""
        self._process.wait()
        # A program that the server started, and left behind, may keep the pipe open.
        self._reader.join(1.0)

    def _read(self) -> None:
        assert self._process.stdout is not None, "its output is a pipe"
        with self._process.stdout as output:
            for line in output:
                text = line.rstrip("\n")
                self._lines.append(text)
                match = _ADDRESS.match(text)
                if match is not None:
                    self.addresses.setdefault(match[1].lower(), match[2])
                if self._on_line is not None:
                    self._on_line(text)
