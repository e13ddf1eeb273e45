"""Loads on demand: one load for all waiting requests, which of them still wait, and a pause after a failure."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from modelserver.errors import ServerError, UnavailableError


class DemandLoads:
    """`load` loads a model by its key. Event loop thread only."""

    def __init__(self, load: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self._load = load
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_waiting: Counter[str] = Counter()
        self._nobody_waits = asyncio.Event()  # for one of the models

    @property
    def num_loading(self) -> int:
        """Models that are being loaded on demand."""
        return len(self._tasks)

    def is_awaited(self, key: str) -> bool:
        """Whether requests wait for the model; it may not be evicted before they are submitted."""
        return self._num_waiting[key] > 0

    async def load(self, key: str) -> None:
        """Load the model, once for all waiting requests. Raises as `load` does."""
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._load(key), name=f"load of {key} on demand")
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        self._num_waiting[key] += 1
        try:
            await asyncio.shield(task)
        finally:
            self._num_waiting[key] -= 1
            if not self._num_waiting[key]:
                del self._num_waiting[key]
                self._nobody_waits.set()

    async def until_served(self, key: str) -> None:
        """Return when no request waits for the model, and each has had a turn of the loop to submit."""
        while self.is_awaited(key):
            self._nobody_waits.clear()
            await self._nobody_waits.wait()

    async def stop(self) -> None:
        """Cancel the loads; waiting requests get the error that `load` raises then."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _forget(self, key: str, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # requests that still wait get it


# The first pause, doubled each time up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class _Failure:
    count: int
    until_s: float
    reason: str


class Backoff:
    """By key. Event loop thread only."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[str, _Failure] = {}

    def note(self, key: str, error: ServerError) -> UnavailableError:
        """Record a failed load; returns the error for the requests that waited for it."""
        before = self._failures.get(key)
        count = before.count + 1 if before is not None else 1
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(count - 1, 30), _LONGEST_PAUSE_S)
        self._failures[key] = _Failure(count, self._clock() + pause_s, error.message)
        told = UnavailableError(error.message)
        told.retry_after_s = pause_s
        return told

    def forget(self, key: str) -> None:
        """Forget the failures: the model serves, or an operator has asked for a load."""
        self._failures.pop(key, None)

    def refusal(self, key: str, name: str) -> UnavailableError | None:
        """The error for requests before the next attempt, with this model name; None if it may be tried now."""
        failure = self._failures.get(key)
        left_s = failure.until_s - self._clock() if failure is not None else 0.0
        if failure is None or left_s <= 0:
            return None
        error = UnavailableError(
            f"model '{name}' could not be loaded on demand, {failure.count} times in a row, and is tried again in "
            f"{left_s:.1f} s: {failure.reason}"
        )
        error.retry_after_s = left_s
        return error
