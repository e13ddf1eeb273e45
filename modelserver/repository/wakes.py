"""Models that are being woken: one load for all who ask, and who of them has not been served yet."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any


class Wakes:
    """`load` brings a model into memory, by its key. Event loop thread only."""

    def __init__(self, load: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self._load = load
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_waiting: Counter[str] = Counter()
        self._nobody_waits = asyncio.Event()  # for one of the models

    @property
    def num_waking(self) -> int:
        """Models that are being loaded because somebody asks for them."""
        return len(self._tasks)

    def is_awaited(self, key: str) -> bool:
        """Whether somebody waits for the model, who is to have it before it may leave again."""
        return self._num_waiting[key] > 0

    async def wake(self, key: str) -> None:
        """Load the model, once for all that ask. Raises what `load` does."""
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._load(key), name=f"waking {key}")
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
        """Return when nobody waits for the model: whoever did has had the turn of the loop in which to submit."""
        while self.is_awaited(key):
            self._nobody_waits.clear()
            await self._nobody_waits.wait()

    async def stop(self) -> None:
        """Give up the loads; who waits is told what `load` makes of that."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _forget(self, key: str, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # those who waited have it, if any still do
