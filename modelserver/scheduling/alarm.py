"""A timer that rings once, at the earliest of the times to which it was set."""

from __future__ import annotations

from collections.abc import Callable

from modelserver.scheduling.loop_calls import LoopCalls, Timer


class Alarm:
    """Event loop thread only. When it rings it is off: whoever hears it sets it for what is left."""

    __slots__ = ("_loop", "_ring", "_timer", "_when_ns")

    def __init__(self, loop: LoopCalls, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: Timer | None = None
        self._when_ns = 0

    def set(self, when_ns: int, now_ns: int) -> None:
        """Ring then, unless it rings before."""
        if self._timer is not None:
            if self._when_ns <= when_ns:
                return
            self._timer.cancel()
        self._when_ns = when_ns
        self._timer = self._loop.call_later(max(0, when_ns - now_ns) / 1e9, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._ring()
