"""Deadlines of calls: one timer for all of them, because a timer each would cost more than parsing a request."""

from __future__ import annotations

import asyncio
import time
from typing import Final, Protocol

TICK_NS: Final = 20_000_000


class Expiring(Protocol):
    """What has a deadline. Hashable by identity."""

    def expire(self) -> None:
        """The deadline has passed. Does not raise."""


class DeadlineWheel:
    """Calls by the tick in which their deadline lies; each expires at the first tick after it.

    A tick is at most `TICK_NS` late. There are no ticks while nothing waits. Event loop thread only.
    """

    __slots__ = ("_loop", "_slots", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, set[Expiring]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call: Expiring, deadline_ns: int) -> None:
        """Have `call.expire` called when `deadline_ns` has passed, unless it is removed before."""
        slot = self._slots.get(deadline_ns // TICK_NS)
        if slot is None:
            slot = self._slots[deadline_ns // TICK_NS] = set()
            if self._timer is None:
                self._schedule()
        slot.add(call)

    def remove(self, call: Expiring, deadline_ns: int) -> None:
        """Forget a call; in vain if it has expired."""
        slot = self._slots.get(deadline_ns // TICK_NS)
        if slot is not None:
            slot.discard(call)
            if not slot:
                del self._slots[deadline_ns // TICK_NS]

    def _schedule(self) -> None:
        # Ticks lie on multiples of TICK_NS: each slot is looked at as soon as all of it has passed. A
        # millisecond later, because loops round to one, and a tick that comes early finds nothing.
        until_tick_ns = TICK_NS - time.monotonic_ns() % TICK_NS
        self._timer = self._loop.call_later(until_tick_ns / 1e9 + 0.001, self._tick)

    def _tick(self) -> None:
        self._timer = None
        current = time.monotonic_ns() // TICK_NS
        for tick in [tick for tick in self._slots if tick < current]:
            for call in self._slots.pop(tick):
                call.expire()
        if self._slots and self._timer is None:
            self._schedule()
