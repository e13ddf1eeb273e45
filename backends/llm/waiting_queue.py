"""The sequences that wait for blocks or for a place, in order; one may leave from anywhere."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from .sequence import Sequence, SequenceStatus


class WaitingQueue:
    """A heap by `key` (no two sequences have the same). Bounded by who adds: the engine's caller limits its requests.

    Who leaves is only marked, and dropped when it comes first or when the marked ones are the most.
    """

    def __init__(self, key: Callable[[Sequence], tuple[int, int]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._num_gone = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_gone

    @property
    def num_kept(self) -> int:
        """Those that wait, and those that have left and are not dropped yet."""
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (self._key(sequence), sequence))

    def first(self) -> Sequence | None:
        """The sequence whose turn it is; it stays."""
        while self._heap:
            sequence = self._heap[0][1]
            if sequence.status is SequenceStatus.WAITING:
                return sequence
            heapq.heappop(self._heap)
            self._num_gone -= 1
        return None

    def pop(self) -> None:
        """Take out the one that `first` has just returned."""
        heapq.heappop(self._heap)

    def discard(self) -> None:
        """Count one that waited and has just got another status."""
        self._num_gone += 1
        if self._num_gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if self._waits(entry[1])]
            heapq.heapify(self._heap)
            self._num_gone = 0

    @staticmethod
    def _waits(sequence: Sequence) -> bool:
        return sequence.status is SequenceStatus.WAITING
