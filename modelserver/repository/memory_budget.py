"""Loads on demand within a memory budget: other models are evicted until a model fits, and its use is measured."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from modelserver.errors import UnavailableError
from modelserver.repository.lru_policy import LruPolicy, plan_room
from modelserver.repository.options import DemandOptions

logger = logging.getLogger(__name__)

# Seconds between checks for room while all models are busy.
_LOOK_AGAIN_S = 0.05
_MIB = 1 << 20


class NoRoomError(UnavailableError):
    """The budget is used up. The model has not failed, so it may be retried at once."""


class MemoryBudget:
    """`load` loads a model, `measure` returns the memory of the process. Event loop thread only."""

    def __init__(
        self,
        options: DemandOptions,
        lru: LruPolicy,
        load: Callable[[str], Awaitable[None]],
        *,
        clock: Callable[[], float],
        measure: Callable[[], int],
    ) -> None:
        self._options = options
        self._lru = lru
        self._load = load
        self._clock = clock
        self._measure = measure
        self._turn = asyncio.Lock()  # one load at a time, so that its memory can be measured
        self._coming: dict[str, int] = {}  # expected memory of the models that are being loaded

    async def load(self, key: str, file_bytes: int) -> None:
        """Make room for a model with files of this size, and load it. Raises ServerError."""
        known = self._lru.num_bytes.get(key, 0)
        if not self._options.budget_bytes:
            await self._load(key)
            self._lru.num_bytes[key] = max(file_bytes, known)
            return
        has_turn = await self._take_turn()
        try:
            self._coming[key] = max(known, self._lru.policy(key).memory_bytes or file_bytes)
            await self._make_room(key, self._coming[key])
            await self._load_measured(key, file_bytes, is_alone=has_turn)
        finally:
            del self._coming[key]
            if has_turn:
                self._turn.release()

    async def _take_turn(self) -> bool:
        """Wait for the loads before this one, but not for ever: the load in progress may itself wait for this model."""
        try:
            async with asyncio.timeout(self._options.room_patience_s):
                return await self._turn.acquire()
        except TimeoutError:
            return False

    async def _load_measured(self, key: str, file_bytes: int, *, is_alone: bool) -> None:
        """Load, and determine the memory: growth of the process, memory of its children, or the config's number.

        With free pages in the allocator the process grows by less, so the files' size and earlier measurements are
        lower bounds. Growth counts only if no other load runs at the same time.
        """
        lru, budget_bytes = self._lru, self._options.budget_bytes
        before = self._measure()
        await self._load(key)
        grown = self._measure() - before if is_alone else 0
        in_children = lru.in_children_bytes(key)
        declared = lru.policy(key).memory_bytes
        measured = max(file_bytes, grown + in_children, in_children, lru.num_bytes.get(key, 0))
        lru.num_bytes[key] = num_bytes = declared or measured
        if num_bytes > budget_bytes:
            logger.warning(
                "model '%s' takes %.0f MiB, more than --on-demand-memory-budget alone; it is not loaded again",
                key,
                num_bytes / _MIB,
            )
        for victim in plan_room(lru.all(but=key), num_bytes, budget_bytes) or ():
            lru.evict(victim, "memory")

    async def _make_room(self, key: str, needed_bytes: int) -> None:
        """Evict the least recently used models until the model fits. Raises NoRoomError if it cannot fit."""
        lru, budget_bytes = self._lru, self._options.budget_bytes
        if needed_bytes > budget_bytes:
            raise NoRoomError(
                f"model '{key}' needs about {needed_bytes / _MIB:.0f} MiB, and --on-demand-memory-budget is "
                f"{budget_bytes / _MIB:.0f} MiB"
            )
        deadline_s = self._clock() + self._options.room_patience_s
        while True:
            others = sum(self._coming.values()) - needed_bytes
            victims = plan_room(lru.all(but=key), needed_bytes, budget_bytes - others)
            left = [lru.evict(victim, "memory") for victim in victims or ()]
            if victims is not None and all(left):
                for victim in victims:
                    await lru.wait_closed(victim)
                return
            if self._clock() >= deadline_s:
                busy = ", ".join(model.key for model in lru.all() if not model.can_leave)
                error = NoRoomError(
                    f"there is no room for model '{key}', which needs about {needed_bytes / _MIB:.0f} MiB of "
                    f"{budget_bytes / _MIB:.0f} MiB: these are in use or pinned: {busy}"
                )
                error.retry_after_s = 1.0
                raise error
            await asyncio.sleep(_LOOK_AGAIN_S)
