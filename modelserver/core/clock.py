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
