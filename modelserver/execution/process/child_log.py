"""The output and log of a child process, limited in length and number of lines.

Log records travel as marked lines, so that they keep their place among the model's prints.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelserver.telemetry.access_log import ACCESS_LOGGER, write_access

_MARK = b"\x1e"
_NEWLINE = b"\x1f"
_LEVELS = {b"D": logging.DEBUG, b"I": logging.INFO, b"W": logging.WARNING, b"E": logging.ERROR}
_LETTERS = {level: letter for letter, level in _LEVELS.items()}
# Marks a line of the access log, whose fields follow as JSON.
_ACCESS = b"A"


def write_record(level: int, text: str) -> None:
    """In the child: one record at a `logging` level; it may have several lines."""
    _write(_LETTERS.get(level, b"I") + text.encode(errors="replace"))


def _write(content: bytes) -> None:
    line = _MARK + content.replace(b"\n", _NEWLINE) + b"\n"
    while line:
        line = line[os.write(2, line) :]


class ChildLogHandler(logging.Handler):
    """In the child: sends log records to the server, with their tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.name == ACCESS_LOGGER:
                _write(_ACCESS + json.dumps(record.fields).encode())  # type: ignore[attr-defined]
            else:
                write_record(_level(record.levelno), self.format(record))
        except OSError:
            self.handleError(record)  # the server no longer reads


def _level(level: int) -> int:
    """The standard level below."""
    return max(logging.DEBUG, min(logging.ERROR, level // 10 * 10))


def parse_line(line: bytes) -> tuple[int, str]:
    """In the server: level and text of one line of output; unmarked lines are INFO."""
    level = logging.INFO
    if line[:1] == _MARK and line[1:2] in _LEVELS:
        level, line = _LEVELS[line[1:2]], line[2:].replace(_NEWLINE, b"\n")
    return level, line.decode(errors="replace")


def parse_access(line: bytes) -> dict[str, Any] | None:
    """In the server: the fields of a line of the access log, which front processes write; None for any other."""
    if line[:2] != _MARK + _ACCESS:
        return None
    try:
        fields = json.loads(line[2:])
    except ValueError:  # it was cut off
        return None
    return fields if isinstance(fields, dict) else None


_logger = logging.getLogger(__name__)

DEFAULT_LINES_PER_S = 200
_TAIL_LINES = 20
_MAX_LINE_BYTES = 8 << 10
# A line counts once for every started piece of this size, so that long lines are limited as many short ones are.
_BYTES_PER_LINE = 200
# After a quiet time, a child may write this many seconds' worth of lines at once.
_BURST_S = 10
# How often dropped lines are reported while lines are being dropped.
_NOTICE_S = 10.0


class ChildOutput:
    """Logs the output of a child. The last lines are kept for its exit report, whether logged or not. For one thread.

    `lines_per_s` 0: no limit. `has_access_log`: lines of the access log are recognised, and not limited.
    """

    def __init__(
        self,
        name: str,
        *,
        lines_per_s: int = DEFAULT_LINES_PER_S,
        has_access_log: bool = False,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._lines_per_s = lines_per_s
        self._has_access_log = has_access_log
        self._now_s = now_s
        self._allowance = float(lines_per_s * _BURST_S)
        self._filled_at_s = self._noticed_at_s = now_s()
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._partial = b""
        self._num_cut = 0  # bytes of the line in progress that are beyond its largest size
        self._num_dropped = 0
        self._dropped_bytes = 0

    def tail(self) -> tuple[str, ...]:
        """The last lines."""
        return tuple(parse_line(line)[1] for line in self._tail)

    def feed(self, data: bytes) -> None:
        """Log the lines that `data` completes."""
        self._refill()
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._extend(line)
            self._end_line()
        self._extend(rest)
        if self._num_dropped and self._now_s() - self._noticed_at_s >= _NOTICE_S:
            self._tell_dropped()

    def finish(self) -> None:
        """Called at the end of the output: log the last, unfinished line, and how much was dropped."""
        if self._partial:
            self._end_line()
        if self._num_dropped:
            self._tell_dropped()

    def _extend(self, part: bytes) -> None:
        room = _MAX_LINE_BYTES - len(self._partial)
        self._partial += part[:room]
        self._num_cut += max(0, len(part) - room)

    def _end_line(self) -> None:
        line, self._partial = self._partial, b""
        if self._num_cut:
            line += b" ... (%d bytes more)" % self._num_cut
            self._num_cut = 0
        if self._has_access_log and (fields := parse_access(line)) is not None:
            write_access(fields)
            return
        self._tail.append(line)
        cost = 1 + len(line) // _BYTES_PER_LINE
        if self._lines_per_s and self._allowance < cost:
            self._num_dropped += 1
            self._dropped_bytes += len(line)
            return
        self._allowance -= cost
        if self._num_dropped:
            self._tell_dropped()
        level, text = parse_line(line)
        _logger.log(level, "%s: %s", self._name, text)

    def _refill(self) -> None:
        now_s = self._now_s()
        most = self._lines_per_s * _BURST_S
        # Nothing before a second's worth is due: otherwise a flood would be logged as single lines with notices.
        gained = (now_s - self._filled_at_s) * self._lines_per_s
        if self._allowance >= self._lines_per_s or gained >= self._lines_per_s:
            self._allowance = min(most, self._allowance + gained)
            self._filled_at_s = now_s

    def _tell_dropped(self) -> None:
        _logger.warning(
            "%s: %d lines of its output, %d bytes, were dropped: it writes more than %d lines a second "
            "(--model-output-lines-per-sec)",
            self._name,
            self._num_dropped,
            self._dropped_bytes,
            self._lines_per_s,
        )
        self._num_dropped = self._dropped_bytes = 0
        self._noticed_at_s = self._now_s()


_MAX_FRAMES = 20
_SERVER_SOURCE = str(Path(__file__).parents[2])


def describe_exception(error: BaseException) -> str:
    """`Type: message`, then where it happened, innermost first; the server's own frames are left out."""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((_SERVER_SOURCE, "<frozen "))
        and not frame.f_globals.get("__name__", "").startswith("modelserver_backends.")
    ]
    lines = [
        f"  {frame.f_code.co_filename}({line}): {frame.f_code.co_name}"
        for frame, line in reversed(frames[-_MAX_FRAMES:])
    ]
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        text += "; name the package that brings it in a requirements.txt beside config.pbtxt"
    return "\n".join([text, "", "At:", *lines]) if lines else text
