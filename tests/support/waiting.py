"""Waiting, in a test without an event loop, for what threads and other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0


def until_true(is_true: Callable[[], bool], what: str, interval_s: float = 0.005) -> None:
    """Ask until it is; fails with `what` when it never is."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end_s, f"in vain: {what}"
        time.sleep(interval_s)
