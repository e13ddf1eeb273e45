"""Staying awake for a moment, where the other process is likely to have a word soon.

To be woken takes longer than a small model takes: two processes that answer each other within some microseconds lose
most of their time by falling asleep in between. So whoever waits looks again and again for a moment before it sleeps.
It lets others run between two looks, and stops doing so for ever longer when that was in vain, or when others do want
to run: on a machine that has nothing to spare, and between requests that are far apart, nearly all waits just sleep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Longer than this nobody lets go of a core for: somebody else has used it.
_CROWDED_NS = 25_000
_MAX_PAUSE = 256


class BusyWait:
    """One waiter's experience. Used by one thread at a time, for one wait after the other.

    A wait is `begin`; where that is true looks, with `go_on` after each that was in vain; and `end`.
    """

    __slots__ = ("_budget_ns", "_deadline_ns", "_let_go", "_next_pause", "_now_ns", "_pause", "_seen_ns")

    def __init__(
        self,
        budget_us: int,
        *,
        num_cores: int | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        let_go: Callable[[], None] = os.sched_yield,
    ) -> None:
        """`budget_us` is how long to look at most; 0 for never, as where there is one core only."""
        num_cores = num_cores or len(os.sched_getaffinity(0))
        self._budget_ns = budget_us * 1000 if num_cores > 1 else 0
        self._now_ns = now_ns
        self._let_go = let_go
        self._deadline_ns = 0
        self._seen_ns = 0
        self._pause = 0  # waits that are to sleep at once
        self._next_pause = 1

    def begin(self) -> bool:
        """Whether to look before sleeping."""
        if not self._budget_ns:
            return False
        if self._pause:
            self._pause -= 1
            return False
        self._seen_ns = self._now_ns()
        self._deadline_ns = self._seen_ns + self._budget_ns
        return True

    def go_on(self) -> bool:
        """Let others run; whether to look once more."""
        self._let_go()
        now_ns = self._now_ns()
        is_crowded = now_ns - self._seen_ns > _CROWDED_NS
        self._seen_ns = now_ns
        return not is_crowded and now_ns < self._deadline_ns

    def end(self, *, has_come: bool) -> None:
        """What was waited for has been seen, or the wait goes on asleep."""
        if has_come:
            self._next_pause = 1
        else:
            self._pause = self._next_pause
            self._next_pause = min(_MAX_PAUSE, 2 * self._next_pause)
