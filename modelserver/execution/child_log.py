"""Log records of a child process as marked lines of its output, so that they keep their place among its prints."""

from __future__ import annotations

import logging
import os

_MARK = b"\x1e"
_NEWLINE = b"\x1f"
_LEVELS = {b"D": logging.DEBUG, b"I": logging.INFO, b"W": logging.WARNING, b"E": logging.ERROR}
_LETTERS = {level: letter for letter, level in _LEVELS.items()}


def write_record(level: int, text: str) -> None:
    """In the child: one record at a `logging` level; it may have several lines."""
    letter = _LETTERS.get(level, b"I")
    line = _MARK + letter + text.encode(errors="replace").replace(b"\n", _NEWLINE) + b"\n"
    while line:
        line = line[os.write(2, line) :]


class ChildLogHandler(logging.Handler):
    """In the child: sends what is logged home, with its traceback."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
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
