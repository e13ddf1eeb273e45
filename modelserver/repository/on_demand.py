"""Models that are loaded at the first request, and unloaded when they are idle or memory is short.

A model on demand is loaded, unloaded, or withheld: an unload request also keeps inference requests from loading it.
Event loop thread only; blocking work goes to a pool.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric

from modelserver.config.on_demand import OnDemandConfig, on_demand_config
from modelserver.errors import (
    SHUTTING_DOWN,
    InvalidArgumentError,
    LoadOnDemandError,
    NotFoundError,
    ServerError,
    UnavailableError,
    UnloadedError,
)
from modelserver.repository.lru_policy import LruPolicy, MemoryBudget, NoRoomError, Sweeper
from modelserver.repository.namespaces import key_of
from modelserver.repository.operations import SupersededError
from modelserver.repository.options import DemandOptions
from modelserver.repository.state import UNLOADED, IndexEntry, ModelState
from modelserver.telemetry.counts import DemandCounts
from modelserver.telemetry.host import own_memory_bytes

if TYPE_CHECKING:
    from modelserver.repository.layout import ModelLayout
    from modelserver.repository.roots import RepositoryScan
    from modelserver.repository.serving import ReadyTable
    from modelserver.repository.table import ModelTable


class DemandLoads:
    """Loads on demand: one load for all waiting requests, which of them still wait, and a pause after a failure.

    `load` loads a model by its key. Event loop thread only.
    """

    def __init__(self, load: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self._load = load
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_waiting: Counter[str] = Counter()
        self._none_waits = asyncio.Event()  # for one of the models

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
                self._none_waits.set()

    async def until_served(self, key: str) -> None:
        """Return when no request waits for the model, and each has had a turn of the loop to submit."""
        while self.is_awaited(key):
            self._none_waits.clear()
            await self._none_waits.wait()

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


# Seconds between searches of the disk for unknown names.
_LOOK_FOR_NAMES_S = 1.0


@dataclass(frozen=True, slots=True)
class RepositoryAccess:
    """The repository's services for its on_demand: loading, scanning the disk, and the calls between models."""

    load: Callable[[str], Awaitable[None]]
    refresh: Callable[[], Awaitable[None]]
    scan: Callable[[], RepositoryScan]
    describe: Callable[[Iterable[ModelLayout]], Awaitable[Mapping[str, OnDemandConfig]]]
    size: Callable[[ModelLayout], Awaitable[int]]
    users: Callable[[str], set[str]]


class OnDemandModels:
    """Models on demand: `lru` says which are in memory and may be evicted, and `loads` loads them for requests.

    `on_active` is called when the first such model appears. With `finds_new` unknown names are looked for on the disk.
    """

    def __init__(
        self,
        options: DemandOptions,
        table: ModelTable,
        access: RepositoryAccess,
        *,
        clock: Callable[[], float] = time.monotonic,
        measure: Callable[[], int] = own_memory_bytes,
    ) -> None:
        self.options = options
        self.is_active = self.finds_new = options.is_on
        self.on_active: Callable[[], None] = lambda: None
        self._table = table
        self._access = access
        self._clock = clock
        self.loads = DemandLoads(self._load)
        self.lru = LruPolicy(options, table, scan=access.scan, users=access.users, is_awaited=self.loads.is_awaited)
        self._budget = MemoryBudget(options, self.lru, access.load, clock=clock, measure=measure)
        self._sweeper = Sweeper(self.lru, clock)
        self._backoff = Backoff(clock)
        self._withheld: set[str] = set()
        self._num_loads: Counter[str] = Counter()
        self._looked_s = -inf

    # State of models.

    async def survey(self, layouts: Iterable[ModelLayout]) -> None:
        """Read the on-demand options in the models' configs, before any model is loaded."""
        for key, policy in (await self._access.describe(layouts)).items():
            self._learn(key, policy)

    def starts_unloaded(self, key: str) -> bool:
        """Whether the model waits for its first request."""
        return self.lru.is_on_demand(key) and not self.lru.policy(key).is_pinned

    def published(self, key: str, table: ReadyTable) -> None:
        """The ready versions of a model have changed."""
        self._sweeper.note_change()
        model = table.get(None)
        if model is None:
            return
        self._learn(key, on_demand_config(model.config))
        self._backoff.forget(key)
        if self.lru.is_on_demand(key):
            self.lru.evicted.pop(key, None)
            self._withheld.discard(key)
            self._sweeper.begin()

    def withhold(self, key: str) -> None:
        """An unload request has unloaded the model: only a load request loads it again."""
        self._withheld.add(key)

    def keep(self, key: str, keep_alive_s: float | None) -> None:
        """Set how long the model is kept, as a load request says; None: as its config says.

        Raises InvalidArgumentError for a model that is not on demand.
        """
        self._backoff.forget(key)
        if keep_alive_s is None:
            self.lru.keep_alive_s.pop(key, None)
        elif not self.lru.is_on_demand(key):
            raise InvalidArgumentError(
                f"load parameter 'keep_alive': model '{key}' is not loaded on demand; start the server with "
                "--load-on-demand, or give the model the parameter load_on_demand"
            )
        else:
            self.lru.keep_alive_s[key] = keep_alive_s
        self._withheld.discard(key)
        self._sweeper.note_change()

    def annotate(self, rows: Sequence[IndexEntry]) -> list[IndexEntry]:
        """The index, with a note on unloaded models on demand."""
        return [self._annotated(row) for row in rows] if self.is_active else list(rows)

    def counts(self) -> DemandCounts:
        return DemandCounts(
            loads=dict(self._num_loads),
            evictions=dict(self.lru.evictions),
            loaded_bytes={model.key: model.num_bytes for model in self.lru.all()},
            num_loading=self.loads.num_loading,
            budget_bytes=self.options.budget_bytes,
        )

    def families(self) -> list[Metric]:
        """The metric families; empty while no model is on demand."""
        return self.counts().families() if self.is_active else []

    # Loading on demand.

    def unloaded_error(self, name: str, version: int | None) -> ServerError | None:
        """The error for a request to a model on demand that is not ready.

        LoadOnDemandError for a model that can be loaded, UnavailableError for one that has just failed to load,
        UnloadedError for one that was removed and still answers what is in flight.
        """
        keys = self._keys(name)
        if len(keys) != 1:
            return self._unknown(name) if not keys else None
        key = keys[0]
        lifecycle = self._table.lifecycles.get(key)
        if lifecycle is not None and lifecycle.replacing is not None:
            return LoadOnDemandError(f"model '{name}' is being replaced; try again", _waiter(lifecycle.replacing))
        if not self._is_loadable(key) or not self._has_version(key, version):
            if self.lru.is_on_demand(key) and key not in self._access.scan().models:
                return UnloadedError(f"Request for unknown model: '{name}' is not found: it was removed")
            return None
        refusal = self._backoff.refusal(key, name)
        return refusal or LoadOnDemandError(
            f"model '{name}' is not in memory; it is loaded on demand", lambda: self.loads.load(key)
        )

    def can_load(self, name: str, version: int | None) -> bool:
        """Whether a request for this model would be answered, if only after loading it."""
        return isinstance(self.unloaded_error(name, version), LoadOnDemandError)

    async def stop(self) -> None:
        """Stop loading on demand and evicting."""
        await self._sweeper.stop()
        await self.loads.stop()

    async def _load(self, key: str) -> None:
        self._num_loads[key] += 1
        try:
            layout = self._access.scan().models.get(key)
            file_bytes = 0
            if layout is not None:
                await self.survey((layout,))
                file_bytes = await self._access.size(layout)
            while True:
                try:
                    await self._account()
                    await self._budget.load(key, file_bytes)
                    await self._account()  # models loaded along with it: the steps of an ensemble
                    return
                except SupersededError:
                    # By a newer load, or by an eviction, which lets requests load the model again.
                    if key in self._withheld:
                        raise
        except asyncio.CancelledError:
            raise UnavailableError(SHUTTING_DOWN) from None
        except (NoRoomError, SupersededError, NotFoundError):
            raise
        except ServerError as error:
            raise self._backoff.note(key, error) from error

    # Implementation.

    async def _account(self) -> None:
        """Account for loaded models that were not loaded on demand."""
        for key in self.lru.unmeasured():
            layout = self._access.scan().models.get(key)
            self.lru.assume(key, 0 if layout is None else await self._access.size(layout))

    def _keys(self, name: str) -> list[str]:
        """The keys of models that a request may mean. Cheap, because clients may ask for names that do not exist."""
        lifecycles, scan = self._table.lifecycles, self._access.scan()
        if not self._table.namespaces.is_on:
            return [name] if name in lifecycles or name in scan.models else []
        return self._table.namespaces.keys(name, {*lifecycles, *scan.models})

    def _learn(self, key: str, policy: OnDemandConfig) -> None:
        self.lru.policies[key] = policy
        if policy.is_on_demand and not self.is_active:
            self.is_active = True
            self.on_active()

    def _is_loadable(self, key: str) -> bool:
        return self.lru.is_on_demand(key) and key not in self._withheld and not self.lru.models(key)

    def _has_version(self, key: str, version: int | None) -> bool:
        layout = self._access.scan().models.get(key)
        return version is None or layout is None or version in layout.versions

    def _annotated(self, row: IndexEntry) -> IndexEntry:
        key = key_of(row.repository, row.name) if self._table.namespaces.is_on else row.name
        if not self._is_loadable(key):
            return row
        if row.state is ModelState.UNKNOWN:
            return replace(row, state=ModelState.UNAVAILABLE, reason="not in memory: loaded on demand")
        if row.is_absent:
            why = self.lru.evicted.get(key, UNLOADED)
            return replace(row, reason=f"not in memory ({why}): loaded on demand")
        return row

    def _unknown(self, name: str) -> ServerError | None:
        """An unknown name may belong to a model that has just been added."""
        if not self.finds_new or self._clock() < self._looked_s + _LOOK_FOR_NAMES_S:
            return None
        return LoadOnDemandError(f"Request for unknown model: '{name}' is not found", lambda: self._look_for(name))

    async def _look_for(self, name: str) -> None:
        self._looked_s = self._clock()
        await self._access.refresh()
        models = self._access.scan().models
        keys = self._table.namespaces.keys(name, models)
        if len(keys) == 1:
            await self.survey((models[keys[0]],))
        if len(keys) != 1 or not (self.options.is_on or self.lru.is_on_demand(keys[0])):
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        await self.loads.load(keys[0])


def _waiter(done: asyncio.Future[None]) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        await asyncio.shield(done)

    return wait
