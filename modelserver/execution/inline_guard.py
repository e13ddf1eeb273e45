"""Watches a model that is executed on the event loop: one that turns slow would hold up everybody else."""

from __future__ import annotations

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


class InlineGuard:
    """Watches executions on the event loop, and tells when they have become slow. Event loop thread only."""

    __slots__ = ("_on_slow", "_score")

    def __init__(self, on_slow: Callable[[], None]) -> None:
        self._on_slow = on_slow
        self._score = 0

    @property
    def is_worried(self) -> bool:
        """Whether also executions within the budget are to be noted."""
        return self._score > 0

    def note(self, duration_ns: int) -> None:
        """An execution took so long. `on_slow` is called each time that it has been too much."""
        if duration_ns <= INLINE_BUDGET_NS:
            self._score = max(0, self._score - 1)
            return
        is_hopeless = duration_ns >= _HOPELESS_NS
        self._score += _TOO_SLOW // 2 if is_hopeless else min(_MAX_WEIGHT, duration_ns // INLINE_BUDGET_NS)
        if self._score >= _TOO_SLOW:
            self._score = 0
            self._on_slow()
