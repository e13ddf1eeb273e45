"""What a child process writes, as lines of the log: long ones are cut, and too many are dropped and counted."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from modelserver.execution.child_log import parse_access, parse_line
from modelserver.telemetry.access_log import write_access

_logger = logging.getLogger(__name__)

DEFAULT_LINES_PER_S = 200
_TAIL_LINES = 20
_MAX_LINE_BYTES = 8 << 10
# A line counts once for each of these bytes that it begins, so that long lines are limited as many short ones are.
_BYTES_PER_LINE = 200
# A child that was quiet may write this many seconds' worth of lines at once.
_BURST_S = 10
# How often dropped lines are mentioned while they go on.
_NOTICE_S = 10.0


class ChildOutput:
    """Fed by one thread. The last lines are kept for the report of the child's end, whether they were logged or not.

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
        """Log the lines that are complete with this."""
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
        # None before a second's worth has come together: else a flood would be logged as single lines with notices.
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
