"""Evicts models on demand after their keep-alive time without requests; sleeps until the next one is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from modelserver.repository.lru_policy import LruPolicy, idle_models

# Seconds between checks for models that are due but busy.
_LOOK_AGAIN_S = 0.05


class Sweeper:
    """Event loop thread only."""

    def __init__(self, lru: LruPolicy, clock: Callable[[], float]) -> None:
        self._lru = lru
        self._clock = clock
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start when a model may be evicted. Safe to repeat."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._sweep(), name="evicting idle models")

    def note_change(self) -> None:
        """Recompute when a model was loaded or unloaded, or its keep-alive time has changed."""
        self._changed.set()

    async def stop(self) -> None:
        """Stop evicting."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _sweep(self) -> None:
        while True:
            now_s = self._clock()
            for loaded in (present := self._lru.all()):
                if not loaded.can_leave:
                    for model in self._lru.models(loaded.key):
                        model.last_use_ns = int(now_s * 1e9)
            for key in idle_models(present, now_s):
                self._lru.evict(key, "idle")
            # Pinned models and models of ensembles become due only when something changes.
            left = [each for each in self._lru.all() if not self._lru.stays(each.key)]
            due_s = min((each.expires_s for each in left), default=inf)
            self._changed.clear()
            try:
                async with asyncio.timeout(None if due_s == inf else max(due_s - now_s, _LOOK_AGAIN_S)):
                    await self._changed.wait()
            except TimeoutError:
                pass
