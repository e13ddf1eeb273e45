"""Models that are loaded when they are asked for, and leave when nobody asks or memory is short.

A model on demand is in memory, asleep, or withheld: unloaded by request, and so not loaded by others' requests. Event
loop thread only; what blocks goes to a pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from modelserver.config.residence import Residence, residence
from modelserver.errors import InvalidArgumentError, ModelAsleepError, NotFoundError, ServerError, UnavailableError
from modelserver.repository.eviction import Resident, idle_ones, plan_room
from modelserver.repository.namespaces import key_of
from modelserver.repository.operations import SupersededError
from modelserver.repository.options import DemandOptions
from modelserver.repository.state import IndexEntry, ModelState
from modelserver.telemetry.memory import own_memory_bytes

if TYPE_CHECKING:
    from modelserver.execution.model import Model
    from modelserver.repository.layout import ModelLayout
    from modelserver.repository.lifecycle import ModelLifecycle, ReadyTable
    from modelserver.repository.roots import RepositoryScan
    from modelserver.repository.table import ModelTable

logger = logging.getLogger(__name__)

# After a load that failed: the first pause, doubled each time up to the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# Between two looks for models that are due and busy, or for room while all are busy.
_LOOK_AGAIN_S = 0.05
# Between two looks at the disk for names that nobody knows.
_LOOK_FOR_NAMES_S = 1.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DemandCounts:
    """Since the server started: loads by requests, evictions by key and reason, and requests that wait now."""

    loads: Mapping[str, int]
    evictions: Mapping[tuple[str, str], int]
    num_waking: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class _Failure:
    count: int
    until_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class RepositoryAccess:
    """What the repository does for its residency: loading, looking at the disk, knowing who calls whom."""

    load: Callable[[str], Awaitable[None]]
    refresh: Callable[[], Awaitable[None]]
    scan: Callable[[], RepositoryScan]
    describe: Callable[[Iterable[ModelLayout]], Awaitable[Mapping[str, Residence]]]
    size: Callable[[ModelLayout], Awaitable[int]]
    users: Callable[[str], set[str]]


class Residency:
    """Who may sleep, who sleeps, and who wakes. `on_active` is called when the first model may."""

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
        self.is_active = options.is_on
        self.on_active: Callable[[], None] = lambda: None
        self._table = table
        self._access = access
        self._clock = clock
        self._measure = measure
        self._policies: dict[str, Residence] = {}
        self._keep_alive_s: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._withheld: set[str] = set()
        self._evicted: dict[str, str] = {}
        self._failures: dict[str, _Failure] = {}
        self._waking: dict[str, asyncio.Task[None]] = {}
        self._awaited: Counter[str] = Counter()  # who waits for a model has it before it may leave again
        self._loads: Counter[str] = Counter()
        self._evictions: Counter[tuple[str, str]] = Counter()
        self._turn = asyncio.Lock()  # with a budget loads go one by one, so that what each takes can be measured
        self._coming: dict[str, int] = {}  # what those that are being loaded will take
        self._changed = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None
        self._looked_s = -inf

    # What is known of models.

    async def survey(self, layouts: Iterable[ModelLayout]) -> None:
        """Read what the models' configs say of their residence, before any is loaded."""
        for key, policy in (await self._access.describe(layouts)).items():
            self._learn(key, policy)

    def sleeps_at_start(self, key: str) -> bool:
        """Whether the model waits for its first request."""
        return self.is_on_demand(key) and not self._policy(key).is_pinned

    def is_on_demand(self, key: str) -> bool:
        """Whether the model is loaded when it is asked for, and may be evicted."""
        wish = self._policy(key).is_on_demand
        return self.options.is_on if wish is None else wish

    def published(self, key: str, table: ReadyTable) -> None:
        """The ready versions of a model have changed."""
        self._changed.set()
        model = table.get(None)
        if model is None:
            return
        self._learn(key, residence(model.config))
        self._failures.pop(key, None)
        if self.is_on_demand(key):
            self._evicted.pop(key, None)
            self._withheld.discard(key)
            self._begin_sweeping()

    def withhold(self, key: str) -> None:
        """The model was unloaded by request: no other request loads it, until one to load does."""
        self._withheld.add(key)

    def keep(self, key: str, keep_alive_s: float | None) -> None:
        """A load has said how long the model is kept; None: as its config says.

        Raises InvalidArgumentError for a model that is not on demand.
        """
        self._failures.pop(key, None)
        if keep_alive_s is None:
            self._keep_alive_s.pop(key, None)
        elif not self.is_on_demand(key):
            raise InvalidArgumentError(
                f"load parameter 'keep_alive': model '{key}' is not loaded on demand; start the server with "
                "--load-on-demand, or give the model the parameter load_on_demand"
            )
        else:
            self._keep_alive_s[key] = keep_alive_s
        self._changed.set()

    def annotate(self, rows: Sequence[IndexEntry]) -> list[IndexEntry]:
        """The index, saying of models that sleep that they do."""
        return [self._annotated(row) for row in rows] if self.is_active else list(rows)

    # Waking.

    def asleep(self, name: str, version: int | None) -> ServerError | None:
        """What is to be told who asks for a model that is not ready, if it is on demand.

        ModelAsleepError for one that can be woken, UnavailableError for one that has just failed to load.
        """
        keys = self._keys(name)
        if len(keys) != 1:
            return self._unknown(name) if not keys else None
        key = keys[0]
        lifecycle = self._table.lifecycles.get(key)
        if lifecycle is not None and lifecycle.replacing is not None:
            return ModelAsleepError(f"model '{name}' is being replaced; try again", _waiter(lifecycle.replacing))
        if not self._sleeps(key) or not self._has_version(key, version):
            return None
        failure = self._failures.get(key)
        left_s = failure.until_s - self._clock() if failure is not None else 0.0
        if failure is not None and left_s > 0:
            error = UnavailableError(
                f"model '{name}' could not be loaded on demand, {failure.count} times in a row, and is tried again in "
                f"{left_s:.1f} s: {failure.reason}"
            )
            error.retry_after_s = left_s
            return error
        return ModelAsleepError(f"model '{name}' is not in memory; it is loaded on demand", lambda: self.wake(key))

    def can_wake(self, name: str, version: int | None) -> bool:
        """Whether a request for this model would be answered, if only after loading it."""
        return isinstance(self.asleep(name, version), ModelAsleepError)

    async def wake(self, key: str) -> None:
        """Load the model, once for all that ask; returns when it serves. Raises ServerError."""
        task = self._waking.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._wake(key), name=f"waking {key}")
            self._waking[key] = task
            task.add_done_callback(lambda done: self._forget_waking(key, done))
        self._awaited[key] += 1
        try:
            await asyncio.shield(task)
        finally:
            self._awaited[key] -= 1

    def _forget_waking(self, key: str, task: asyncio.Task[None]) -> None:
        del self._waking[key]
        if not task.cancelled():
            task.exception()  # those who waited have it, if any still do

    async def _wake(self, key: str) -> None:
        self._loads[key] += 1
        try:
            layout = self._access.scan().models.get(key)
            file_bytes = 0
            if layout is not None:
                await self.survey((layout,))
                file_bytes = await self._access.size(layout)
            if not self.options.budget_bytes:
                await self._access.load(key)
                self._bytes[key] = max(file_bytes, self._bytes.get(key, 0))
                return
            has_turn = await self._take_turn()
            try:
                self._coming[key] = max(self._bytes.get(key, 0), self._policy(key).memory_bytes or file_bytes)
                await self._make_room(key, self._coming[key])
                await self._load_measured(key, file_bytes, is_alone=has_turn)
            finally:
                del self._coming[key]
                if has_turn:
                    self._turn.release()
        except asyncio.CancelledError:
            raise UnavailableError("the server is shutting down") from None
        except (_NoRoomError, SupersededError, NotFoundError):
            raise
        except ServerError as error:
            before = self._failures.get(key)
            count = before.count + 1 if before is not None else 1
            pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(count - 1, 30), _LONGEST_PAUSE_S)
            self._failures[key] = _Failure(count, self._clock() + pause_s, error.message)
            # Whoever asked did nothing wrong, and may come again.
            told = UnavailableError(error.message)
            told.retry_after_s = pause_s
            raise told from error

    async def _take_turn(self) -> bool:
        """Wait for the loads before this one, but not for ever: a model may wait for this one while it is loaded."""
        try:
            async with asyncio.timeout(self.options.room_patience_s):
                return await self._turn.acquire()
        except TimeoutError:
            return False

    async def _load_measured(self, key: str, file_bytes: int, *, is_alone: bool) -> None:
        """Load, and find out what it takes: what the process grew by, what its children hold, or what the config says.

        An allocator that has free pages grows by less: the files are the least that counts, and what was seen before.
        Unless it is alone, what the process grew by says nothing of this model.
        """
        before = self._measure()
        await self._access.load(key)
        grown = self._measure() - before if is_alone else 0
        models = self._models(key)
        in_children = sum(usage.byte_size for model in models for usage in model.memory_usage())
        declared = self._policy(key).memory_bytes
        self._bytes[key] = declared or max(file_bytes, grown + in_children, in_children, self._bytes.get(key, 0))
        if self._bytes[key] > self.options.budget_bytes:
            logger.warning(
                "model '%s' takes %.0f MiB, more than --on-demand-memory-budget alone; it is not loaded again",
                key,
                self._bytes[key] / _MIB,
            )
        for victim in plan_room(self._residents(but=key), self._bytes[key], self.options.budget_bytes) or ():
            self._evict(victim, "memory")

    async def _make_room(self, key: str, needed_bytes: int) -> None:
        """Evict the least recently used until the model fits. Raises UnavailableError when it cannot."""
        budget = self.options.budget_bytes
        if needed_bytes > budget:
            raise _NoRoomError(
                f"model '{key}' needs about {needed_bytes / _MIB:.0f} MiB, and --on-demand-memory-budget is "
                f"{budget / _MIB:.0f} MiB"
            )
        deadline_s = self._clock() + self.options.room_patience_s
        while True:
            others = sum(self._coming.values()) - needed_bytes
            victims = plan_room(self._residents(but=key), needed_bytes, budget - others)
            left = [self._evict(victim, "memory") for victim in victims or ()]
            if victims is not None and all(left):
                for victim in victims:
                    await self._table.lifecycles[victim].wait_retired()
                return
            if self._clock() >= deadline_s:
                busy = ", ".join(resident.key for resident in self._residents() if not resident.can_leave)
                error = _NoRoomError(
                    f"there is no room for model '{key}', which needs about {needed_bytes / _MIB:.0f} MiB of "
                    f"{budget / _MIB:.0f} MiB: these are in use or pinned: {busy}"
                )
                error.retry_after_s = 1.0
                raise error
            await asyncio.sleep(_LOOK_AGAIN_S)

    # Leaving.

    def residents(self) -> list[Resident]:
        """The models on demand that are in memory."""
        return self._residents()

    def counts(self) -> DemandCounts:
        return DemandCounts(dict(self._loads), dict(self._evictions), len(self._waking), self.options.budget_bytes)

    async def stop(self) -> None:
        """Wake and evict nobody any more."""
        tasks = [*self._waking.values(), *([self._sweeper] if self._sweeper is not None else [])]
        self._sweeper = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _residents(self, but: str = "") -> list[Resident]:
        return [self._resident(key) for key in self._table.lifecycles if key != but and self._is_resident(key)]

    def _is_resident(self, key: str) -> bool:
        return bool(self._models(key)) and self.is_on_demand(key)

    def _resident(self, key: str) -> Resident:
        models, policy = self._models(key), self._policy(key)
        kept_s = self._keep_alive_s.get(key, policy.keep_alive_s)
        lifecycle = self._table.lifecycles[key]
        is_busy = lifecycle.is_busy or self._awaited[key] > 0 or not all(model.is_idle for model in models)
        return Resident(
            key=key,
            num_bytes=self._bytes.get(key, 0),
            last_use_s=max(model.last_use_ns for model in models) / 1e9,
            keep_alive_s=self.options.keep_alive_s if kept_s is None else kept_s,
            can_leave=not (is_busy or self._stays(key)),
        )

    def _stays(self, key: str) -> bool:
        """Whether the model is pinned, called by an ensemble that is loaded, or would not come back as it is."""
        comes_back = self._table.lifecycles[key].is_as_stored and key in self._access.scan().models
        return self._policy(key).is_pinned or bool(self._access.users(key)) or not comes_back

    def _evict(self, key: str, reason: str) -> bool:
        """Unload the model if it is idle; whether it was."""
        if not self._table.lifecycles[key].evict():
            return False
        self._evictions[key, reason] += 1
        self._evicted[key] = "idle" if reason == "idle" else "to make room"
        logger.info("model '%s' is evicted (%s); it is loaded again on demand", key, self._evicted[key])
        return True

    def _begin_sweeping(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="evicting idle models")

    async def _sweep(self) -> None:
        """Evict what is idle for too long; asleep until the next one may be."""
        while True:
            now_s = self._clock()
            for resident in (residents := self._residents()):
                if not resident.can_leave:
                    for model in self._models(resident.key):
                        model.last_use_ns = int(now_s * 1e9)
            for key in idle_ones(residents, now_s):
                self._evict(key, "idle")
            # What is pinned, or of an ensemble, is due when something changes.
            left = [each for each in self._residents() if not self._stays(each.key)]
            due_s = min((resident.expires_s for resident in left), default=inf)
            self._changed.clear()
            try:
                async with asyncio.timeout(None if due_s == inf else max(due_s - now_s, _LOOK_AGAIN_S)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    # Below: how.

    def _keys(self, name: str) -> list[str]:
        """The keys of models that a request may mean. Cheap, because anybody may ask for what there is not."""
        lifecycles, scan = self._table.lifecycles, self._access.scan()
        if not self._table.namespaces.is_on:
            return [name] if name in lifecycles or name in scan.models else []
        return self._table.namespaces.keys(name, {*lifecycles, *scan.models})

    def _policy(self, key: str) -> Residence:
        return self._policies.get(key, _UNSAID)

    def _learn(self, key: str, policy: Residence) -> None:
        self._policies[key] = policy
        if policy.is_on_demand and not self.is_active:
            self.is_active = True
            self.on_active()

    def _models(self, key: str) -> list[Model]:
        lifecycle: ModelLifecycle | None = self._table.lifecycles.get(key)
        return lifecycle.models if lifecycle is not None else []

    def _sleeps(self, key: str) -> bool:
        return self.is_on_demand(key) and key not in self._withheld and not self._models(key)

    def _has_version(self, key: str, version: int | None) -> bool:
        layout = self._access.scan().models.get(key)
        return version is None or layout is None or version in layout.versions

    def _annotated(self, row: IndexEntry) -> IndexEntry:
        key = key_of(row.repository, row.name) if self._table.namespaces.is_on else row.name
        if not self._sleeps(key):
            return row
        if row.state is ModelState.UNKNOWN:
            return replace(row, state=ModelState.UNAVAILABLE, reason="not in memory: loaded on demand")
        if row.state is ModelState.UNAVAILABLE and row.reason == "unloaded":
            why = self._evicted.get(key, "unloaded")
            return replace(row, reason=f"not in memory ({why}): loaded on demand")
        return row

    def _unknown(self, name: str) -> ServerError | None:
        """A name that nobody knows may be of a model that has just been put there."""
        if not self.options.is_on or self._clock() < self._looked_s + _LOOK_FOR_NAMES_S:
            return None
        return ModelAsleepError(f"Request for unknown model: '{name}' is not found", lambda: self._look_for(name))

    async def _look_for(self, name: str) -> None:
        self._looked_s = self._clock()
        await self._access.refresh()
        keys = self._table.namespaces.keys(name, self._access.scan().models)
        if len(keys) != 1:
            raise NotFoundError(f"Request for unknown model: '{name}' is not found")
        await self.wake(keys[0])


class _NoRoomError(UnavailableError):
    """The budget is spent: no fault of the model, which may be tried again at once."""


_UNSAID = Residence()


def _waiter(done: asyncio.Future[None]) -> Callable[[], Awaitable[None]]:
    async def wait() -> None:
        await asyncio.shield(done)

    return wait
