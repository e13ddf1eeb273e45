"""How long a connection waits for its peer. Decides from the values it is given; uses no socket and no clock."""

from __future__ import annotations

from modelserver.wire.limits import TimeLimits


class Progress:
    """Watches a count of bytes that must grow: without a pause of `pause_s`, and at a rate over a window.

    The clock starts, and starts again by `restart`, at the first `check`.
    """

    __slots__ = ("_count", "_moved_s", "_window_count", "_window_s")

    def __init__(self) -> None:
        self._count = self._window_count = 0
        self._moved_s: float | None = None
        self._window_s = 0.0

    def restart(self) -> None:
        """Start measuring again; earlier pauses no longer count."""
        self._moved_s = None

    def paused_s(self, now_s: float, count: int) -> float:
        """For how long `count` has not grown."""
        if self._moved_s is None:
            self._window_s, self._window_count = now_s, count
            self._moved_s = now_s
        elif count != self._count:
            self._moved_s = now_s
        self._count = count
        return now_s - self._moved_s

    def is_too_slow(self, now_s: float, count: int, times: TimeLimits) -> bool:
        """Whether a body of which `count` bytes have come pauses for too long, or trickles."""
        if self.paused_s(now_s, count) > times.body_pause_s:
            return True
        if now_s - self._window_s < times.body_window_s:
            return False
        is_slow = count - self._window_count < times.body_rate * (now_s - self._window_s)
        self._window_s, self._window_count = now_s, count
        return is_slow
