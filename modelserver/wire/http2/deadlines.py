"""Deadlines of calls: one timer for all of them, because a timer each would cost more than parsing a request."""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

TICK_NS: Final = 1_000_000
# While calls wait, the timer runs at least this often, so that calls need not reset it.
_HORIZON_NS: Final = 20_000_000


class Expiring(Protocol):
    """A call with a deadline. Hashable by identity."""

    __slots__ = ()

    def expire(self) -> None:
        """The deadline has passed. Does not raise."""


class DeadlineWheel:
    """Calls by the tick of their deadline; each expires when the tick has passed.

    That is at most `TICK_NS` late. There is no timer while nothing waits. Event loop thread only.
    """

    __slots__ = ("_loop", "_slots", "_timer", "_wake_ns")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, set[Expiring]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._wake_ns = 0

    def add(self, call: Expiring, deadline_ns: int) -> None:
        """Have `call.expire` called when `deadline_ns` has passed, unless it is removed before."""
        tick = deadline_ns // TICK_NS
        slot = self._slots.get(tick)
        if slot is None:
            slot = self._slots[tick] = set()
            if self._timer is None or (tick + 1) * TICK_NS < self._wake_ns:
                self._schedule(tick)
        slot.add(call)

    def remove(self, call: Expiring, deadline_ns: int) -> None:
        """Forget a call; does nothing if it has expired."""
        slot = self._slots.get(deadline_ns // TICK_NS)
        if slot is not None:
            slot.discard(call)
            if not slot:
                del self._slots[deadline_ns // TICK_NS]

    def _schedule(self, tick: int) -> None:
        """Check when this tick, the earliest, has passed."""
        if self._timer is not None:
            self._timer.cancel()
        now_ns = time.monotonic_ns()
        self._wake_ns = min((tick + 1) * TICK_NS, now_ns + _HORIZON_NS)
        # A millisecond later, because loops round to one, and an early check would find nothing.
        self._timer = self._loop.call_later(max(0, self._wake_ns - now_ns) / 1e9 + 0.001, self._look)

    def _look(self) -> None:
        self._timer = None
        current = time.monotonic_ns() // TICK_NS
        for tick in [tick for tick in self._slots if tick < current]:
            # A call that expires may remove other late calls of the slot.
            for call in self._slots.pop(tick, ()):
                call.expire()
        if self._slots and self._timer is None:
            self._schedule(min(self._slots))
