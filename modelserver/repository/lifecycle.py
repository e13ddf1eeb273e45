"""One model's life: loads, swaps, retires its versions, and knows the state of each.

An operation (load or unload) is one transaction over all versions of the model, or about one of them. All
methods are called from the event loop thread; what blocks goes to the pools.

    read definition -> plan -> load new versions (old ones serve) -> swap in one loop step -> old ones:
    stop -> drain (what is in flight is answered) -> close
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from modelserver.config.residence import ReloadMode, reload_mode
from modelserver.errors import ConfigError, InvalidArgumentError, ServerError, UnavailableError
from modelserver.repository.definition import ModelDefinition
from modelserver.repository.load_failure import CompletionError, VersionsFailedError, describe_failure
from modelserver.repository.load_request import LoadRequest
from modelserver.repository.loader import LoadSource, ModelLoader
from modelserver.repository.operations import OperationQueue, OperationRequest, SupersededError, UnloadRequest
from modelserver.repository.override_store import OverrideStore
from modelserver.repository.plan import LoadedVersion, ReloadPlan, plan_reload
from modelserver.repository.retirement import Retirement
from modelserver.repository.rolling import Rolling, can_roll
from modelserver.repository.state import IndexEntry, LoadCounts, ModelState

if TYPE_CHECKING:
    from modelserver.execution.model import Model

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# How many changes by an override the index tells; the log tells all.
_MOST_CHANGES = 10

# How long the second half of a rolling reload waits for the old version to be closed.
_ROLLING_PATIENCE_S = 60.0

# Ready models by version; None is the highest one. Replaced as a whole, never changed.
ReadyTable = Mapping[int | None, "Model"]


async def _no_ensembles(name: str, _definition: ModelDefinition) -> None:
    raise UnavailableError(f"model '{name}': there is nobody who knows the models of an ensemble")


def _unbound(name: str, _loaded: LoadedVersion) -> ServerError:
    return UnavailableError(f"model '{name}': there is nobody who knows the models of an ensemble")


@dataclass(frozen=True, slots=True)
class LifecycleContext:
    """What all models of a repository share.

    `compose` loads the models that an ensemble needs, `bind` lets it call those that serve now (see `ensembles`).
    `publish` makes a ready table what `get` answers from (empty: the model is gone). `force_close` is set
    when waiting for requests in flight must end.
    """

    loader: ModelLoader
    load_pool: Executor
    close_pool: Executor
    publish: Callable[[str, ReadyTable], None]
    force_close: asyncio.Event
    compose: Callable[[str, ModelDefinition], Awaitable[None]] = _no_ensembles
    bind: Callable[[str, LoadedVersion], ServerError | None] = _unbound
    overrides: OverrideStore | None = None


class ModelLifecycle:
    """The versions of one model, whatever their state."""

    def __init__(self, name: str, context: LifecycleContext) -> None:
        self.name = name
        self.counts = LoadCounts()
        self._context = context
        self._loaded: dict[int, LoadedVersion] = {}
        self._retirement = Retirement(
            name,
            close_pool=context.close_pool,
            close=context.loader.close,
            force_close=context.force_close,
            on_closed=self._note_closed,
        )
        self._loading: tuple[int, ...] = ()
        self._is_loading = False
        # Why the last load failed: by version, or under None when no version was reached.
        self._failures: dict[int | None, str] = {}
        self._unloaded: set[int] = set()
        # What there is to say of the versions that are ready: by what override they serve.
        self._note = ""
        # Whether the model should be ready: the last operation that ended was a load.
        self._is_wanted = False
        self._is_stopped = False
        self._is_vacated = False
        # Whether another load would bring the same: what serves is what is on disk, or what was kept of an override.
        self.is_as_stored = True
        # Ensembles whose models are there and do not fit.
        self._mismatched: set[int] = set()
        self._operations = OperationQueue(name, self._perform)

    def load(self, request: LoadRequest) -> asyncio.Future[None]:
        """Load or reload; done when the new versions serve, or with the ServerError that kept them from it."""
        return self._submit(request)

    def unload(self, version: int | None = None) -> asyncio.Future[None]:
        """Done when the model, or that version, takes no more requests; those it has are answered afterwards."""
        return self._submit(UnloadRequest(version))

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are ready, ascending."""
        return tuple(sorted(version for version, loaded in self._loaded.items() if not loaded.model.fault))

    @property
    def models(self) -> list[Model]:
        """The ready models, ascending by version."""
        return [self._loaded[version].model for version in self.versions]

    @property
    def ensembles(self) -> list[LoadedVersion]:
        """The loaded versions that are ensembles, whether or not their models are there."""
        return [loaded for loaded in self._loaded.values() if loaded.model.is_ensemble]

    @property
    def pending_load(self) -> asyncio.Future[None] | None:
        """The end of a load that is going on or waits, unless it will be undone."""
        return self._operations.pending_load

    @property
    def is_busy(self) -> bool:
        """Whether an operation is going on or waits."""
        return self._operations.runner is not None

    def evict(self) -> bool:
        """Unload the model if nothing is going on and no request is in flight; whether that was so.

        It happens within this call: no request can come in between.
        """
        idle = all(loaded.model.is_idle for loaded in self._loaded.values())
        if self._is_stopped or self.is_busy or not self._loaded or not idle:
            return False
        self._unload()
        return True

    async def wait_retired(self, timeout_s: float | None = None) -> None:
        """Return when versions that were unloaded or replaced are closed, or time is up."""
        if tasks := tuple(self._retirement.tasks):
            await asyncio.wait(tasks, timeout=timeout_s)

    @property
    def replacing(self) -> asyncio.Future[None] | None:
        """The end of a reload before which the model does not serve, because it leaves memory first."""
        return self._operations.pending_load if self._is_vacated else None

    def rebind(self) -> None:
        """The models of an ensemble have changed: call the new ones, or do not serve."""
        for loaded in self.ensembles:
            before = (loaded.model.fault, loaded.model.composing)
            self._bind(loaded)
            if before[0] != loaded.model.fault:
                verb = f"cannot serve: {loaded.model.fault}" if loaded.model.fault else "serves again"
                logger.info("ensemble '%s' version %d %s", self.name, loaded.version, verb)
            if before != (loaded.model.fault, loaded.model.composing):
                self._publish()

    @property
    def is_known(self) -> bool:
        """Whether the model serves, or should."""
        return bool(self._loaded) or self._is_wanted

    @property
    def retiring_models(self) -> list[Model]:
        """Models that take nothing new and finish what they have, the last one first."""
        return [loaded.model for loaded in reversed(self._retirement.versions)]

    @property
    def is_as_wanted(self) -> bool:
        """Whether the model serves, or should not: an unloaded one, or one whose first load still runs.

        An ensemble whose models were unloaded on request should not either.
        """
        return bool(self._loaded.keys() - self._mismatched) or not self._is_wanted

    def index(self) -> list[IndexEntry]:
        """One row per known version, ascending; one without a version if none is known."""
        general = self._failures.get(None, "")
        rows: dict[int, tuple[ModelState, str]] = {}
        rows |= dict.fromkeys(self._unloaded, (ModelState.UNAVAILABLE, general or "unloaded"))
        rows |= {
            version: (ModelState.UNAVAILABLE, reason)
            for version, reason in self._failures.items()
            if version is not None
        }
        rows |= {retiring.version: (ModelState.UNLOADING, "") for retiring in self._retirement.versions}
        rows |= dict.fromkeys(self._loading, (ModelState.LOADING, ""))
        rows |= {
            version: (ModelState.READY, self._failures.get(version, general) or self._note) for version in self._loaded
        }
        rows |= {
            version: (ModelState.UNAVAILABLE, loaded.model.fault)
            for version, loaded in self._loaded.items()
            if loaded.model.fault
        }
        if rows:
            return [IndexEntry(self.name, version, *rows[version]) for version in sorted(rows)]
        if self._is_loading:
            return [IndexEntry(self.name, None, ModelState.LOADING)]
        state = ModelState.UNAVAILABLE if general else ModelState.UNKNOWN
        return [IndexEntry(self.name, None, state, general)]

    def stop(self) -> None:
        """Take nothing more: loaded versions go, an operation that waits or runs will fail."""
        self._is_stopped = True
        self._operations.supersede("the server is shutting down")
        self._unload()

    async def wait_idle(self) -> None:
        """Return when nothing is going on any more."""
        while tasks := self._running_tasks():
            await asyncio.wait(tasks)

    def cancel(self) -> None:
        """Give up what is going on; the loader closes what that leaves open."""
        for task in self._running_tasks():
            task.cancel()

    def _running_tasks(self) -> list[asyncio.Task[None]]:
        runner = self._operations.runner
        return [*self._retirement.tasks, *([runner] if runner is not None else [])]

    def _submit(self, request: OperationRequest) -> asyncio.Future[None]:
        if self._is_stopped:
            raise UnavailableError("the server is shutting down")
        return self._operations.submit(request)

    async def _perform(self, request: OperationRequest) -> None:
        if isinstance(request, UnloadRequest):
            self._unload(request.version)
        else:
            await self._load(request)

    # Loading.

    async def _load(self, request: LoadRequest) -> None:
        started = time.monotonic()
        self._is_loading = True
        source: LoadSource | None = None
        try:
            source = await self._in_load_pool(self._context.loader.read, self.name, request)
            source = replace(source, is_wanted=lambda: self._is_still_wanted(request.version))
            if source.definition.config.is_ensemble:
                await self._context.compose(self.name, source.definition)
            await self._replace(source, request.version)
        except CompletionError as error:
            reasons = dict.fromkeys(error.versions, error.reason)
            failed = VersionsFailedError(self.name, reasons, needs_change=error.needs_change)
            self._note_failure(failed, request.version)
            raise failed from error
        except ServerError as error:
            self._note_failure(error, request.version)
            raise
        finally:
            self._is_loading = False
            self._loading = ()
            self._is_wanted = not self._is_stopped
            self._publish()  # a model that failed to load is known from now on
            if source is not None and source.holdings:
                self._context.close_pool.submit(source.release)
        self._forget_failures(request.version)
        self.is_as_stored = request.version is None and (request.is_plain or bool(request.persists))
        self.counts = LoadCounts(self.counts.successes + 1, self.counts.failures, time.monotonic() - started)
        if request.version is None:
            self._note = await self._in_load_pool(self._settle_override, request, source)

    def _settle_override(self, request: LoadRequest, source: LoadSource) -> str:
        """Keep or forget the override, as asked, and say how the model stands to the one that is kept. Blocking."""
        store = self._context.overrides
        if store is None:
            return ""
        if request.persists:
            store.save(self.name, request)
        elif request.persists is False:
            store.remove(self.name)
        if request.persists or source.request.is_stored:
            shown = [*source.changes[:_MOST_CHANGES], *(["..."] if len(source.changes) > _MOST_CHANGES else [])]
            return f"overridden, also after a restart: {'; '.join(shown) or 'nothing differs'}"
        return "an override that is kept is not in use before the next start" if store.has(self.name) else ""

    def _forget_failures(self, version: int | None) -> None:
        if version is None:
            self._failures = {}
        else:
            self._failures = {key: reason for key, reason in self._failures.items() if key not in (None, version)}

    def _note_failure(self, error: ServerError, version: int | None) -> None:
        serving = f"; versions {list(self.versions)} still serve" if self._loaded else ""
        logger.error("loading model '%s' failed%s: %s", self.name, serving, error.message)
        self._forget_failures(version)
        if isinstance(error, VersionsFailedError):
            self._failures.update(error.reasons.items())
        elif version is None or version in self._loaded:
            self._failures[version] = describe_failure(error)
        self.counts = LoadCounts(self.counts.successes, self.counts.failures + 1, self.counts.last_duration_s)

    async def _replace(self, source: LoadSource, version: int | None) -> None:
        """Bring up what the definition asks for and swap it in; on failure everything is as before.

        With `version` the definition is of that one, and the others stay as they are. A model that does not fit twice
        leaves first (`ReloadMode.UNLOAD_FIRST`), and comes back on failure if its files are still there.
        """
        definition = source.definition
        plan = plan_reload(self._loaded, definition, keeps_others=version is not None)
        self._loading = plan.load
        serving = [number for number in plan.load if number in self._loaded]
        mode = reload_mode(definition.config)
        rollings = self._rollings(source, serving) if mode is ReloadMode.ROLLING else {}
        vacated = await self._vacate(serving) if mode is ReloadMode.UNLOAD_FIRST and serving else {}
        try:
            fresh = await self._load_versions(source, plan.load, rollings)
            try:
                await self._prepare_swap(definition, plan, fresh, version)
            except ServerError:
                await self._discard(fresh, rollings)
                raise
        except ServerError:
            await self._restore(vacated, version)
            self._check_still_wanted(version)  # a load that was given up because of an unload is no failure of its own
            raise
        finally:
            self._is_vacated = False
            self._release_holdings(vacated.values())
        self._swap(definition, plan, fresh)
        for number, rolling in rollings.items():
            await self.wait_retired(_ROLLING_PATIENCE_S)
            await rolling.finish(fresh[number])

    async def _prepare_swap(
        self, definition: ModelDefinition, plan: ReloadPlan, fresh: Mapping[int, LoadedVersion], version: int | None
    ) -> None:
        self._check_still_wanted(version)
        await self._update_instances(plan.update, definition)
        for loaded in fresh.values():
            error = self._context.bind(self.name, loaded) if loaded.model.is_ensemble else None
            if error is not None:
                # No ConfigError, after which only a change of the file would help: its models may change.
                raise error if not isinstance(error, ConfigError) else InvalidArgumentError(error.message)

    def _rollings(self, source: LoadSource, versions: Iterable[int]) -> dict[int, Rolling]:
        """How versions are replaced instance by instance, those that can be."""
        return {
            version: Rolling(self._in_load_pool, self._context.loader, source, self._loaded[version])
            for version in versions
            if can_roll(self._loaded[version].definition.config, source.definition.config)
        }

    async def _discard(self, fresh: Mapping[int, LoadedVersion], rollings: Mapping[int, Rolling]) -> None:
        for version, rolling in rollings.items():
            if version in fresh:
                await rolling.undo(fresh[version])
        await self._retirement.close_all(fresh.values())

    async def _vacate(self, versions: Iterable[int]) -> dict[int, LoadedVersion]:
        """Unload versions that are replaced, and wait until they are closed. What they need on disk is held."""
        vacated = {version: self._loaded[version] for version in versions}
        for loaded in vacated.values():
            for holding in loaded.holdings:
                holding.acquire()
        self._loaded = {version: loaded for version, loaded in self._loaded.items() if version not in vacated}
        self._is_vacated = True
        self._publish()
        for loaded in vacated.values():
            self._retirement.retire(loaded)
        await self.wait_retired()
        return vacated

    async def _restore(self, vacated: Mapping[int, LoadedVersion], wanted: int | None) -> None:
        """Load versions again that have left for others that did not come, if their files are as they were."""
        for version, loaded in vacated.items():
            if self._is_stopped or self._operations.is_unload_waiting(wanted):
                return
            old = LoadSource(loaded.definition, loaded.holdings)
            try:
                self._loaded[version] = await self._in_load_pool(self._context.loader.load, old, version)
            except ServerError as error:
                logger.error("model '%s' version %d does not come back: %s", self.name, version, error.message)
            else:
                logger.info("model '%s' version %d is back", self.name, version)

    def _release_holdings(self, versions: Iterable[LoadedVersion]) -> None:
        for loaded in versions:
            for holding in loaded.holdings:
                self._context.close_pool.submit(holding.release)

    async def _load_versions(
        self, source: LoadSource, versions: Iterable[int], rollings: Mapping[int, Rolling]
    ) -> dict[int, LoadedVersion]:
        """All of `versions`, or none: raises when one fails, with Triton's words about each."""
        jobs = {
            version: rollings[version].begin()
            if version in rollings
            else self._in_load_pool(self._context.loader.load, source, version)
            for version in versions
        }
        results = await asyncio.gather(*jobs.values(), return_exceptions=True)
        loaded: dict[int, LoadedVersion] = {}
        failures: dict[int, ServerError] = {}
        for version, result in zip(jobs, results, strict=True):
            if isinstance(result, ServerError):
                failures[version] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                loaded[version] = result
        if failures:
            await self._discard(loaded, rollings)
            self._unloaded |= loaded.keys() - self._loaded.keys()
            raise VersionsFailedError(
                self.name, {version: describe_failure(error) for version, error in failures.items()}
            )
        return loaded

    def _is_still_wanted(self, version: int | None) -> bool:
        """Whether a load of that version, or of all, makes sense. Called from any thread."""
        return not self._is_stopped and not self._operations.is_unload_waiting(version)

    def _check_still_wanted(self, version: int | None) -> None:
        """An unload that came meanwhile makes a swap pointless."""
        if self._is_stopped:
            raise UnavailableError("the server is shutting down")
        if not self._is_still_wanted(version):
            raise SupersededError(f"model '{self.name}': superseded by a newer unload of the model")

    async def _update_instances(self, versions: Iterable[int], definition: ModelDefinition) -> None:
        updated: list[LoadedVersion] = []
        try:
            for version in versions:
                await self._in_load_pool(self._context.loader.update, self._loaded[version], definition)
                updated.append(self._loaded[version])
        except ServerError:
            for loaded in updated:
                await self._in_load_pool(self._context.loader.update, loaded, loaded.definition)
            raise

    def _swap(self, definition: ModelDefinition, plan: ReloadPlan, fresh: Mapping[int, LoadedVersion]) -> None:
        """From one request to the next, the new versions answer. No await here."""
        if self._is_stopped:
            for loaded in fresh.values():
                self._retirement.retire(loaded)
            raise UnavailableError("the server is shutting down")
        replaced = [self._loaded[version] for version in (*plan.load, *plan.retire) if version in self._loaded]
        for version in plan.update:
            loaded = self._loaded[version]
            if loaded.definition.config.dynamic_batching != definition.config.dynamic_batching:
                loaded.model.update_scheduling(definition.config)
                logger.info("model '%s' version %d follows another dynamic_batching in place", self.name, version)
        for version in (*plan.keep, *plan.update):
            self._loaded[version].definition = definition
        gone = {*plan.load, *plan.retire}
        self._loaded = {version: loaded for version, loaded in self._loaded.items() if version not in gone} | {**fresh}
        self._mismatched -= gone
        self._publish()
        for loaded in replaced:
            self._retirement.retire(loaded)
        logger.info("model '%s' serves versions %s", self.name, list(self.versions))

    # Unloading.

    def _unload(self, version: int | None = None) -> None:
        """Stop all versions at once, or the one; they drain and close on their own."""
        self._forget_failures(version)
        retired = [loaded for loaded in self._loaded.values() if version in (None, loaded.version)]
        self._loaded = {number: loaded for number, loaded in self._loaded.items() if loaded not in retired}
        if version is None or (retired and not self._loaded):
            self._is_wanted = False
        self._publish()
        for loaded in retired:
            self._retirement.retire(loaded)

    def _bind(self, loaded: LoadedVersion) -> ServerError | None:
        error = self._context.bind(self.name, loaded)
        self._mismatched.discard(loaded.version)
        if isinstance(error, ConfigError):
            self._mismatched.add(loaded.version)
        return error

    def _publish(self) -> None:
        versions = self.versions
        table: dict[int | None, Model] = {version: self._loaded[version].model for version in versions}
        if versions:
            table[None] = table[versions[-1]]
        self._context.publish(self.name, table)

    def _note_closed(self, version: int) -> None:
        if version not in self._loaded:
            self._unloaded.add(version)

    async def _in_load_pool(self, function: Callable[..., Result], *args: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._context.load_pool, function, *args)
