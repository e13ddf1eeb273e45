"""Log records of a child process as marked lines of its output, so that they keep their place among its prints."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from modelserver.telemetry.access_log import ACCESS_LOGGER

_MARK = b"\x1e"
_NEWLINE = b"\x1f"
_LEVELS = {b"D": logging.DEBUG, b"I": logging.INFO, b"W": logging.WARNING, b"E": logging.ERROR}
_LETTERS = {level: letter for letter, level in _LEVELS.items()}
# Of a line of the access log, whose fields follow as JSON.
_ACCESS = b"A"


def write_record(level: int, text: str) -> None:
    """In the child: one record at a `logging` level; it may have several lines."""
    _write(_LETTERS.get(level, b"I") + text.encode(errors="replace"))


def _write(content: bytes) -> None:
    line = _MARK + content.replace(b"\n", _NEWLINE) + b"\n"
    while line:
        line = line[os.write(2, line) :]


class ChildLogHandler(logging.Handler):
    """In the child: sends what is logged home, with its traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.name == ACCESS_LOGGER:
                _write(_ACCESS + json.dumps(record.fields).encode())  # type: ignore[attr-defined]
            else:
                write_record(_level(record.levelno), self.format(record))
        except OSError:
            self.handleError(record)  # the server no longer reads: nobody is left to be told


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
