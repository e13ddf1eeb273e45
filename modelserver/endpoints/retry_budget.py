"""How many requests may be sent again, so that retries do not multiply the load of servers in trouble."""

from __future__ import annotations

from modelserver.core.clock import Clock

SHARE = 0.1
PER_S = 3.0
# What an idle pool saves up.
MAX_SAVED = 30.0


class RetryBudget:
    """A tenth of the requests, and three per second, may be retries. On one thread."""

    __slots__ = ("_clock", "_filled_ns", "_saved")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._saved = MAX_SAVED
        self._filled_ns = clock.now_ns()

    def deposit(self) -> None:
        """A request was sent for the first time."""
        if self._saved < MAX_SAVED:
            self._saved += SHARE

    def take(self) -> bool:
        """Whether one more retry is allowed; it is paid for then."""
        now_ns = self._clock.now_ns()
        self._saved = min(MAX_SAVED, self._saved + PER_S * (now_ns - self._filled_ns) / 1e9)
        self._filled_ns = now_ns
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
