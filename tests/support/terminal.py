"""A command whose standard error is a terminal: what people see beside the result, which goes to a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from dataclasses import dataclass
from pathlib import Path

_SIZE = struct.pack("HHHH", 40, 160, 0, 0)
_CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Shown:
    """How a command ended, its output, and what the terminal got: `raw`, and as text without colours and the like."""

    status: int
    output: str
    raw: bytes

    @property
    def text(self) -> str:
        return _CONTROL.sub(b"", self.raw).decode()


def run_on_terminal(*words: str | Path, timeout_s: float = 120.0) -> Shown:
    """`modelserver <words>`, whose errors and progress go to a terminal of 160 columns."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, _SIZE)
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "CI", "COLUMNS")}
        process = subprocess.Popen(
            [sys.executable, "-m", "modelserver", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env={**environment, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    pieces: list[bytes] = []
    reader = threading.Thread(target=_read, args=(ours, pieces), name="terminal")
    reader.start()
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(ours)
    return Shown(process.returncode, output.decode(), b"".join(pieces))


def _read(fd: int, pieces: list[bytes]) -> None:
    """Until nobody has the other end any more."""
    while True:
        try:
            piece = os.read(fd, 65536)
        except OSError:  # Linux says so at the end
            return
        if not piece:
            return
        pieces.append(piece)
