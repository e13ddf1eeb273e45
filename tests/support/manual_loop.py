"""An event loop for schedulers: it stands still, its timers follow a ManualClock, and a test runs its callbacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.support.manual_clock import ManualClock


class ManualTimer:
    def __init__(self, when_ns: int, callback: Callable[[], object]) -> None:
        self.when_ns = when_ns
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualLoop:
    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.timers: list[ManualTimer] = []
        # What is to be called after this turn; None: turns end at once.
        self.turn: list[Callable[[], None]] | None = None

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: object) -> ManualTimer:
        timer = ManualTimer(self.clock.now_ns() + round(delay * 1e9), partial(callback, *args))
        self.timers.append(timer)
        return timer

    def call_soon(self, callback: Callable[[], None], /) -> None:
        if self.turn is None:
            callback()
        else:
            self.turn.append(callback)

    def end_turn(self) -> None:
        """Run what was called during the turn that began when `turn` became a list."""
        turn, self.turn = self.turn or [], None
        for callback in turn:
            callback()

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: object) -> None:
        callback(*args)

    def run_timers(self) -> None:
        """Run the callbacks of the timers whose time has come, and those that they start for now."""
        while due := [timer for timer in self.timers if timer.is_cancelled or timer.when_ns <= self.clock.now_ns()]:
            self.timers = [timer for timer in self.timers if timer not in due]
            for timer in due:
                if not timer.is_cancelled:
                    timer.callback()
