"""Time as an object, so that schedulers can be driven by tests without sleeping."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic nanoseconds since an arbitrary origin."""

    def now_ns(self) -> int: ...


class SystemClock:
    """The machine's monotonic clock."""

    now_ns = staticmethod(time.monotonic_ns)


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_us(self, microseconds: int) -> None:
        self._now_ns += microseconds * 1000
