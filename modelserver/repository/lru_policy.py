"""Loaded models on demand: the memory of each, how long it is kept, and which models are evicted for others."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from modelserver.config.on_demand import OnDemandConfig
from modelserver.errors import UnavailableError
from modelserver.repository.options import DemandOptions

if TYPE_CHECKING:
    from modelserver.execution.model import Model
    from modelserver.repository.roots import RepositoryScan
    from modelserver.repository.table import ModelTable

logger = logging.getLogger(__name__)

_UNSAID = OnDemandConfig()


class LruPolicy:
    """Data about models by key, loaded or not. Event loop thread only.

    `users` are the loaded ensembles that call a model, `is_awaited` says whether requests wait for one.
    """

    def __init__(
        self,
        options: DemandOptions,
        table: ModelTable,
        *,
        scan: Callable[[], RepositoryScan],
        users: Callable[[str], set[str]],
        is_awaited: Callable[[str], bool],
    ) -> None:
        self.policies: dict[str, OnDemandConfig] = {}
        self.keep_alive_s: dict[str, float] = {}  # set by load requests
        self.num_bytes: dict[str, int] = {}
        self.evictions: Counter[tuple[str, str]] = Counter()  # by key and reason
        self.evicted: dict[str, str] = {}  # reasons of evicted models that are not loaded again
        self._options = options
        self._table = table
        self._scan = scan
        self._users = users
        self._is_awaited = is_awaited

    def policy(self, key: str) -> OnDemandConfig:
        return self.policies.get(key, _UNSAID)

    def is_on_demand(self, key: str) -> bool:
        """Whether requests load the model, and it may be evicted."""
        wish = self.policy(key).is_on_demand
        return self._options.is_on if wish is None else wish

    def models(self, key: str) -> list[Model]:
        """Its ready versions."""
        lifecycle = self._table.lifecycles.get(key)
        return lifecycle.models if lifecycle is not None else []

    def all(self, but: str = "") -> list[LoadedModel]:
        """The models on demand that are in memory, without one of them."""
        return [self._loaded_model(key) for key in self._table.lifecycles if key != but and self._is_loaded(key)]

    def in_children_bytes(self, key: str) -> int:
        """The memory of the processes of its versions."""
        return sum(usage.byte_size for model in self.models(key) for usage in model.memory_usage())

    def unmeasured(self) -> list[str]:
        """Models that were not loaded on demand: at start, by a load request, or as steps of an ensemble."""
        return [key for key in self._table.lifecycles if key not in self.num_bytes and self._is_loaded(key)]

    def assume(self, key: str, file_bytes: int) -> None:
        """An estimate without a measurement: the config's number or the memory of its processes, at least its files."""
        assumed = self.policy(key).memory_bytes or max(file_bytes, self.in_children_bytes(key))
        self.num_bytes.setdefault(key, assumed)

    def stays(self, key: str) -> bool:
        """Whether the model is pinned, called by a loaded ensemble, or could not be reloaded in the same form."""
        comes_back = self._table.lifecycles[key].is_as_stored and key in self._scan().models
        return self.policy(key).is_pinned or bool(self._users(key)) or not comes_back

    def evict(self, key: str, reason: str) -> bool:
        """Unload the model if it is idle; returns whether it was. `reason` is "idle" or "memory"."""
        if not self._table.lifecycles[key].evict():
            return False
        self.evictions[key, reason] += 1
        self.evicted[key] = "idle" if reason == "idle" else "to make room"
        logger.info("model '%s' is evicted (%s); it is loaded again on demand", key, self.evicted[key])
        return True

    async def wait_closed(self, key: str) -> None:
        """Return when evicted models are closed."""
        await self._table.lifecycles[key].wait_retired()

    def _is_loaded(self, key: str) -> bool:
        return bool(self.models(key)) and self.is_on_demand(key)

    def _loaded_model(self, key: str) -> LoadedModel:
        models = self.models(key)
        kept_s = self.keep_alive_s.get(key, self.policy(key).keep_alive_s)
        lifecycle = self._table.lifecycles[key]
        is_busy = lifecycle.is_busy or self._is_awaited(key) or not all(model.is_idle for model in models)
        return LoadedModel(
            key=key,
            num_bytes=self.num_bytes.get(key, 0),
            last_use_s=max(model.last_use_ns for model in models) / 1e9,
            keep_alive_s=self._options.keep_alive_s if kept_s is None else kept_s,
            can_leave=not (is_busy or self.stays(key)),
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory that was loaded on demand, or may be. Times are seconds of one clock.

    `can_leave` unless it is pinned, busy, or called by an ensemble that is loaded. `keep_alive_s` inf is for ever.
    """

    key: str
    num_bytes: int
    last_use_s: float
    keep_alive_s: float
    can_leave: bool

    @property
    def expires_s(self) -> float:
        return self.last_use_s + self.keep_alive_s


def idle_models(models: Iterable[LoadedModel], now_s: float) -> list[str]:
    """Models without requests for as long as they are kept."""
    return [model.key for model in models if model.can_leave and model.expires_s <= now_s]


def plan_room(models: Iterable[LoadedModel], needed_bytes: int, budget_bytes: int) -> tuple[str, ...] | None:
    """The least recently used ones that must leave for `needed_bytes` to fit; None: not enough may leave now."""
    everyone = list(models)
    excess = sum(model.num_bytes for model in everyone) + needed_bytes - budget_bytes
    leaving: list[str] = []
    for model in sorted(everyone, key=lambda model: model.last_use_s):
        if excess <= 0:
            break
        if model.can_leave and model.num_bytes:
            leaving.append(model.key)
            excess -= model.num_bytes
    return tuple(leaving) if excess <= 0 else None


# Loads on demand within a memory budget: other models are evicted until a model fits, and its use is measured.
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


class Sweeper:
    """Evicts models on demand after their keep-alive time without requests; sleeps until the next one is due.

    Event loop thread only.
    """

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
