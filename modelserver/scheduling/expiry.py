"""When queued requests expire: their times in a heap, and a timer for the earliest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol

from modelserver.scheduling.queue import QueueEntry


class LoopCalls(Protocol):
    """The services of an event loop that a batcher uses."""

    def call_soon(self, callback: Callable[[], None], /) -> object: ...

    def call_later(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle: ...

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: object) -> object: ...


class Alarm:
    """A timer that rings once, at the earliest of the times to which it was set. Event loop thread only.

    It is off once it has rung: the callback sets it again if more times are left. The callback is passed each time,
    because a stored one would make a reference cycle that outlives the owner.
    """

    __slots__ = ("_loop", "_timer", "_when_ns")

    def __init__(self, loop: LoopCalls) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._when_ns = 0

    def set(self, when_ns: int, now_ns: int, ring: Callable[[], None]) -> None:
        """Ring at `when_ns`, unless it is set to an earlier time."""
        if self._timer is not None:
            if self._when_ns <= when_ns:
                return
            self._timer.cancel()

        def on_timer() -> None:
            self._timer = None
            ring()

        self._when_ns = when_ns
        self._timer = self._loop.call_later(max(0, when_ns - now_ns) / 1e9, on_timer)


# Below this size the heap is not worth cleaning.
_MIN_CLEAN = 64


class ExpiryTimes:
    """Expiry times of queued entries. An entry that left the queue costs nothing but its place until it is cleaned."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, QueueEntry]] = []
        self._num_added = 0
        self._clean_at = _MIN_CLEAN

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, entry: QueueEntry, expires_ns: int) -> None:
        self._num_added += 1
        heappush(self._heap, (expires_ns, self._num_added, entry))
        if len(self._heap) >= self._clean_at:
            self._heap = [item for item in self._heap if item[2].is_queued]
            heapify(self._heap)
            # At least as many adds as there are live entries come before the next cleaning: O(1) each.
            self._clean_at = max(_MIN_CLEAN, 2 * len(self._heap))

    def due(self, now_ns: int) -> list[QueueEntry]:
        """Remove and return the queued entries whose time has come."""
        due: list[QueueEntry] = []
        while self._heap and (self._heap[0][0] <= now_ns or not self._heap[0][2].is_queued):
            entry = heappop(self._heap)[2]
            if entry.is_queued:
                due.append(entry)
        return due

    def next_ns(self) -> int | None:
        """The earliest time at which a queued entry expires."""
        while self._heap and not self._heap[0][2].is_queued:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
