"""A clock that a test moves."""

from __future__ import annotations


class ManualClock:
    """Stands still until a test moves it."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_us(self, microseconds: int) -> None:
        self._now_ns += microseconds * 1000
