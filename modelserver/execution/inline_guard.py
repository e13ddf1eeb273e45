"""Watches a model that is executed on the event loop: one that turns slow would hold up everybody else."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

# How long an execution may keep the event loop; docs/configuration.md promises it.
INLINE_BUDGET_NS = 200_000

# An execution over the budget counts as many times as it used the budget up, at most so often, and one within it takes
# one off: so that four slow ones in a row are too many, but not those that come now and then because the machine
# had something else to do.
_MAX_WEIGHT = 4
_TOO_SLOW = 16
# No machine is away for that long by accident.
_HOPELESS_NS = 100_000_000


# CPU time in ns that a thread has used, how often it waited by itself, and how often it was made to.
ThreadUse = tuple[int, int, int]


def thread_use() -> ThreadUse:
    """What the calling thread has used so far; where the system does not count waits there were none."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return time.thread_time_ns(), 0, 0
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return time.thread_time_ns(), usage.ru_nvcsw, usage.ru_nivcsw


class InlineGuard:
    """Watches executions on the event loop, and tells when they have become slow. Event loop thread only.

    Once one was slow it looks closer at the next ones: an execution that had to wait for a processor, and neither
    computed for long nor waited for anything else, says nothing about the model.
    """

    __slots__ = ("_before", "_on_slow", "_score", "_thread_use", "is_worried")

    def __init__(self, on_slow: Callable[[], None], thread_use: Callable[[], ThreadUse] = thread_use) -> None:
        self._on_slow = on_slow
        self._thread_use = thread_use
        self._score = 0
        self._before: ThreadUse | None = None
        # Whether `begin` is to be called, and executions within the budget are to be noted too.
        self.is_worried = False

    def begin(self) -> None:
        """An execution begins."""
        self._before = self._thread_use()

    def note(self, duration_ns: int) -> None:
        """An execution took so long. `on_slow` is called each time that it has been too much."""
        before, self._before = self._before, None
        if duration_ns <= INLINE_BUDGET_NS:
            self._set_score(max(0, self._score - 1))
            return
        if before is not None and self._was_kept_waiting(before):
            return
        is_hopeless = duration_ns >= _HOPELESS_NS
        weight = _TOO_SLOW // 2 if is_hopeless else min(_MAX_WEIGHT, duration_ns // INLINE_BUDGET_NS)
        self._set_score(self._score + weight)
        if self._score >= _TOO_SLOW:
            self._set_score(0)
            self._on_slow()

    def _set_score(self, score: int) -> None:
        self._score = score
        self.is_worried = score > 0

    def _was_kept_waiting(self, before: ThreadUse) -> bool:
        cpu_ns, num_waits, num_forced = (now - then for now, then in zip(self._thread_use(), before, strict=True))
        return num_forced > 0 and num_waits == 0 and cpu_ns <= INLINE_BUDGET_NS
