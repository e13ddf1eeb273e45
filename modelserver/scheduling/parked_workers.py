"""Where workers wait for their next batch, and which of them is woken."""

from __future__ import annotations

from _thread import allocate_lock
from collections.abc import Callable
from typing import Protocol


class WaitingWorker(Protocol):
    """A worker's place at a batcher. The batcher changes the flags under its lock.

    `is_parked`: it waits to be woken. `is_woken`: it was woken and has not looked at the queue since.
    `is_closed`: it gets no more batches. `is_left`: its worker has seen that, and does not come back.
    """

    is_parked: bool
    is_woken: bool
    is_closed: bool
    is_left: bool

    @property
    def wakes_after_turn(self) -> bool:
        """Whether it is better woken after the event loop's turn: a thread would contend for the interpreter."""

    def wake(self) -> None:
        """Make the worker look at the queue. Called under the batcher's lock, so it only gives the signal."""

    def settle(self) -> None:
        """Clear the signal of the last `wake`, even if the worker came for another reason. Called as `wake` is."""


class Place:
    """An instance's worker. `load`: its requests that are not answered, queued ones included.

    `is_away`: the instance takes none now.
    """

    def __init__(self, worker: WaitingWorker) -> None:
        self.worker: WaitingWorker | None = worker  # None once it has left
        self.load = 0.0
        self.is_away = False
        self.last_number = 0  # of the request that it got last

    @property
    def is_open(self) -> bool:
        return not self.is_away and self.worker is not None and not self.worker.is_closed


class WaitingThread:
    """A worker thread, for its batcher. It sleeps on a lock of its own, the cheapest signal between threads.

    A thread that has been idle may end (`rest`); `wake` then calls `start`, which starts another.
    """

    wakes_after_turn = True
    __slots__ = ("_guard", "_has_ended", "_signal", "_start", "is_closed", "is_left", "is_parked", "is_woken")

    def __init__(self, start: Callable[[], None] | None = None) -> None:
        self._signal = allocate_lock()
        self._signal.acquire()
        self._start = start
        self._guard = allocate_lock()  # for `_has_ended` where it changes back
        self._has_ended = False
        self.is_parked = False
        self.is_woken = False
        self.is_closed = False
        self.is_left = False

    def wake(self) -> None:
        self._signal.release()
        if self._has_ended and self._takes_back_end():
            assert self._start is not None, "only threads that can be started again end"
            self._start()

    def settle(self) -> None:
        self._signal.acquire(blocking=False)

    def sleep(self, timeout_ns: int) -> None:
        """Wait for `wake`, at most that long. Called from the worker's thread."""
        if timeout_ns > 0:
            self._signal.acquire(timeout=timeout_ns / 1e9)

    def rest(self, patience_s: float) -> bool:
        """Wait for `wake`. False if the thread is to end, after `patience_s` without it. From the worker's thread."""
        if self._start is None:
            return self._signal.acquire()
        if self._signal.acquire(timeout=patience_s):
            return True
        # A `wake` from here on starts a thread; one that came before has left its signal.
        self._has_ended = True
        return self._signal.acquire(blocking=False) and self._takes_back_end()

    def leave(self) -> None:
        """Forget how to start a thread: the worker has left, and would be held by it."""
        self._start = None

    def _takes_back_end(self) -> bool:
        """Whether this call, and no other, found the thread ended: exactly one of them goes on."""
        with self._guard:
            had_ended, self._has_ended = self._has_ended, False
        return had_ended


class ParkedWorkers:
    """The workers that sleep; every call is made under the batcher's lock.

    At most one is woken at a time: it wakes the next one itself if it leaves requests. At most one, the watcher,
    looks again by itself at a certain time, when a queue delay ends.
    """

    def __init__(self) -> None:
        self._parked: list[WaitingWorker] = []
        self._watcher: WaitingWorker | None = None
        self._num_woken = 0

    @property
    def can_wake(self) -> bool:
        """Whether a worker sleeps and none is on its way to look at the queue."""
        return bool(self._parked) and not self._num_woken

    @property
    def next_to_wake(self) -> WaitingWorker | None:
        """The worker that `wake_one` would wake; None where `can_wake` is false."""
        return (self._watcher or self._parked[-1]) if self._parked and not self._num_woken else None

    @property
    def is_watched(self) -> bool:
        return self._watcher is not None

    def park(self, worker: WaitingWorker, wait_until_ns: int | None) -> int | None:
        """The worker goes to sleep; returns when it must look again: never, if another one watches already."""
        worker.is_parked = True
        self._parked.append(worker)
        if wait_until_ns is None or self._watcher is not None:
            return None
        self._watcher = worker
        return wait_until_ns

    def unpark(self, worker: WaitingWorker) -> None:
        """The worker is back, woken or by itself."""
        if worker.is_parked:
            self._remove(worker)
        if worker.is_woken:
            worker.is_woken = False
            self._num_woken -= 1
            worker.settle()

    def wake_one(self) -> None:
        """Wake the watcher, or else the worker that fell asleep last. At least one must sleep."""
        self.wake(self._watcher or self._parked[-1])

    def wake_watcher(self) -> None:
        """Let the watcher, if any, work out again when to look."""
        if self._watcher is not None:
            self.wake(self._watcher)

    def wake(self, worker: WaitingWorker) -> None:
        self._remove(worker)
        worker.is_woken = True
        self._num_woken += 1
        worker.wake()

    def _remove(self, worker: WaitingWorker) -> None:
        self._parked.remove(worker)
        worker.is_parked = False
        if self._watcher is worker:
            self._watcher = None
