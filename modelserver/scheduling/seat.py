"""Where a worker waits for its next batch."""

from __future__ import annotations

from _thread import allocate_lock
from typing import Protocol


class Seat(Protocol):
    """A worker's place at a batcher. The batcher changes the flags under its lock.

    `is_parked`: it waits to be woken. `is_woken`: it was woken and has not looked at the queue since.
    `is_closed`: it gets no more batches.
    """

    is_parked: bool
    is_woken: bool
    is_closed: bool

    def wake(self) -> None:
        """Make the worker look at the queue. Called under the batcher's lock, so it only gives the signal."""

    def settle(self) -> None:
        """The signal of the last `wake` is spent, even if the worker came for another reason. Called as `wake` is."""


class ThreadSeat:
    """The seat of a worker thread: it sleeps on a lock of its own, the cheapest signal between two threads."""

    __slots__ = ("_signal", "is_closed", "is_parked", "is_woken")

    def __init__(self) -> None:
        self._signal = allocate_lock()
        self._signal.acquire()
        self.is_parked = False
        self.is_woken = False
        self.is_closed = False

    def wake(self) -> None:
        self._signal.release()

    def settle(self) -> None:
        self._signal.acquire(blocking=False)

    def sleep(self, timeout_ns: int | None) -> None:
        """Wait for `wake`, at most that long. Called from the worker's thread."""
        if timeout_ns is None:
            self._signal.acquire()
        elif timeout_ns > 0:
            self._signal.acquire(timeout=timeout_ns / 1e9)
