"""One operation of a store, as the caller follows it: reports of progress, and a way to cancel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from modelserver.errors import CancelledError


@dataclass(frozen=True, slots=True)
class Progress:
    """One report. With a `digest`, `completed` of the blob's `total` bytes are done; 0 of both for other steps."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


class StoreTask:
    """Handed to an operation, which calls `report` from its threads, one at a time. `cancel` may come from any."""

    def __init__(self, report: Callable[[Progress], None] | None = None) -> None:
        self._report = report
        self._cancelled = threading.Event()
        self._lock = threading.Lock()  # guards calls of _report
        self._parts: list[StoreTask] = []

    def cancel(self) -> None:
        """End the operation at its next step; it raises CancelledError. Partial downloads stay, to be resumed."""
        self._cancelled.set()
        for part in self._parts:
            part.cancel()

    def part(self) -> StoreTask:
        """A part of this task, which may be cancelled alone, and is cancelled with it."""
        part = StoreTask(self._report)
        part._lock = self._lock
        self._parts.append(part)
        if self._cancelled.is_set():
            part.cancel()
        return part

    def check(self) -> None:
        """Raise CancelledError if the operation was cancelled."""
        if self._cancelled.is_set():
            raise CancelledError("the operation was cancelled")

    def report(self, status: str, digest: str = "", total: int = 0, completed: int = 0) -> None:
        """Tell the caller about progress. Raises CancelledError."""
        self.check()
        if self._report is not None:
            with self._lock:
                self._report(Progress(status, digest, total, completed))

    def wait(self, seconds: float) -> None:
        """Sleep, but not beyond a cancellation. Raises CancelledError."""
        self._cancelled.wait(seconds)
        self.check()
