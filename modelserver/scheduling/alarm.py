"""A timer that rings once, at the earliest of the times to which it was set."""

from __future__ import annotations

from collections.abc import Callable

from modelserver.scheduling.loop_calls import LoopCalls, Timer


class Alarm:
    """Event loop thread only. When it rings it is off: whoever hears it sets it for what is left.

    Who hears it is said each time: while it is off it refers to nobody, so that no circle outlives its owner.
    """

    __slots__ = ("_loop", "_timer", "_when_ns")

    def __init__(self, loop: LoopCalls) -> None:
        self._loop = loop
        self._timer: Timer | None = None
        self._when_ns = 0

    def set(self, when_ns: int, now_ns: int, ring: Callable[[], None]) -> None:
        """Ring then, unless it rings before."""
        if self._timer is not None:
            if self._when_ns <= when_ns:
                return
            self._timer.cancel()

        def on_timer() -> None:
            self._timer = None
            ring()

        self._when_ns = when_ns
        self._timer = self._loop.call_later(max(0, when_ns - now_ns) / 1e9, on_timer)
