"""When queued requests lose their patience: a heap of times, cleaned of entries that left the queue."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from modelserver.scheduling.queue import QueueEntry

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
