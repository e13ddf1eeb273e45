"""The lifecycles of a repository's models. Each is made at the first request for its model.

Also the start: which models to load, and what keeps the server from starting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from modelserver.errors import SHUTTING_DOWN, AlreadyExistsError, InvalidArgumentError, ServerError, UnavailableError
from modelserver.repository.ensembles import Ensembles
from modelserver.repository.lifecycle import ModelLifecycle
from modelserver.repository.load_request import LoadRequest
from modelserver.repository.loader import ModelLoader
from modelserver.repository.namespaces import Namespaces, check_model_name
from modelserver.repository.on_demand import OnDemandModels
from modelserver.repository.operations import RepositoryPools
from modelserver.repository.options import ControlMode, RepositoryOptions
from modelserver.repository.override_store import OverrideStore
from modelserver.repository.roots import duplicate_reason
from modelserver.repository.serving import LifecycleContext, ReadyTable
from modelserver.repository.table import ModelTable
from modelserver.repository.traffic import TrafficTable

# Load by the stored override if it exists, else as on disk.
AS_KEPT = LoadRequest(is_stored=True)


class Lifecycles:
    """Made when the repository starts. Event loop thread only.

    `force_close` is set when waiting for requests in flight must end; `is_stopping` when no more models may be loaded.
    """

    def __init__(
        self,
        table: ModelTable,
        loader: ModelLoader,
        pools: RepositoryPools,
        *,
        ensembles: Ensembles,
        on_demand: OnDemandModels,
        traffic: TrafficTable,
        overrides: OverrideStore | None,
        unload_grace_s: float = 0.0,
    ) -> None:
        self.is_stopping = False
        self.force_close = asyncio.Event()
        self._table = table
        self._loader = loader
        self._pools = pools
        self._ensembles = ensembles
        self._on_demand = on_demand
        self._traffic = traffic
        self._context = LifecycleContext(
            loader,
            pools.load,
            pools.close,
            self._publish,
            self.force_close,
            ensembles.compose,
            ensembles.bind,
            overrides,
            unload_grace_s,
        )

    def of(self, key: str) -> ModelLifecycle:
        """The model's lifecycle, made if there is none. Raises UnavailableError when the server stops."""
        lifecycle = self._table.lifecycles.get(key)
        if lifecycle is None:
            if self.is_stopping:  # the model would never be closed
                raise UnavailableError(SHUTTING_DOWN)
            lifecycle = self._table.lifecycles[key] = ModelLifecycle(key, self._context)
        return lifecycle

    async def check_exists(self, key: str, version: int | None = None) -> None:
        """Raise NotFoundError for a model, or a version of it, that no root holds."""
        await self._pools.in_scan(self._loader.check_exists, key, version)

    async def ensure_loaded(self, key: str) -> None:
        """Return when the model serves, or raise the reason; NotFoundError when no root holds it.

        Waits for a running load: the caller may want the new model.
        """
        if key not in self._table.lifecycles:
            await self.check_exists(key)
        lifecycle = self.of(key)
        pending = lifecycle.pending_load
        if pending is None:
            if lifecycle.versions:
                return
            pending = lifecycle.load(AS_KEPT)
        try:
            await asyncio.shield(pending)
        except ServerError:
            if not lifecycle.versions:
                raise

    def unload(self, key: str, version: int | None, *, evicts: bool) -> Awaitable[None]:
        """Unload a model that has a lifecycle. With `evicts` any request loads it again, else only a load request.

        The unload is queued among the model's operations when this returns, except for an eviction while requests wait
        for the model.
        """
        if evicts:
            return (
                self._evict(key, version)
                if self._on_demand.loads.is_awaited(key)
                else self._submit_unload(key, version)
            )
        if version is None:
            self._on_demand.withhold(key)  # at once: a load that this supersedes must not be retried
        is_serving = version is None or version in self._table.lifecycles[key].versions
        unloaded = self._submit_unload(key, version)
        return self._withhold_after(key, unloaded) if is_serving else unloaded

    def _submit_unload(self, key: str, version: int | None) -> Awaitable[None]:
        return asyncio.shield(self._table.lifecycles[key].unload(version))

    async def _evict(self, key: str, version: int | None) -> None:
        await self._on_demand.loads.until_served(key)
        await self._submit_unload(key, version)

    async def _withhold_after(self, key: str, unloaded: Awaitable[None]) -> None:
        """A model that is unloaded as a whole, or by its last version, stays unloaded."""
        await unloaded
        if not self._table.lifecycles[key].versions:
            self._on_demand.withhold(key)

    def _publish(self, key: str, table: ReadyTable) -> None:
        self._table.publish(key, table)
        self._on_demand.published(key, table)
        if self._traffic.splits:
            name = self._table.namespaces.name_of(key)
            self._traffic.follow(name, self._table.ready_versions(name))
        if not self.is_stopping:  # at stop every model is unloaded anyway
            self._ensembles.published(key)


# The models to load at start, their failures, and the reasons why a started repository is not ready.


def names_at_start(options: RepositoryOptions, namespaces: Namespaces, found: Sequence[str]) -> list[str]:
    """The keys of the models to load, of those `found` or not: all, or those that `--load-model` names.

    Raises InvalidArgumentError for invalid names, and for names beside `*`.
    """
    if options.control_mode is not ControlMode.EXPLICIT:
        return list(found)
    names = sorted(set(options.load_models))
    if "*" not in names:
        for name in names:
            check_model_name(name)
        return sorted({key for name in names for key in namespaces.keys(name, found) or [name]})
    if len(names) > 1:
        raise InvalidArgumentError("--load-model=* loads every model: name no other model beside it")
    return list(found)


async def load_all(
    keys: Iterable[str], duplicates: Mapping[str, tuple[Path, ...]], load: Callable[[str], Awaitable[None]]
) -> dict[str, ServerError]:
    """Load these models concurrently, except `duplicates`; returns the failures by key."""
    failures: dict[str, ServerError] = {}
    loads: dict[str, Awaitable[None]] = {}
    for key in keys:
        if key in duplicates:
            failures[key] = AlreadyExistsError(duplicate_reason(key, duplicates[key]))
        else:
            loads[key] = load(key)
    results = await asyncio.gather(*loads.values(), return_exceptions=True)
    for key, result in zip(loads, results, strict=True):
        if isinstance(result, ServerError):
            failures[key] = result
        elif isinstance(result, BaseException):
            raise result
    return dict(sorted(failures.items()))


class StartupError(ServerError):
    """Models that should have been loaded at start were not; `failures` has the error of each."""

    def __init__(self, failures: Mapping[str, ServerError]) -> None:
        self.failures = dict(failures)
        lines = "".join(f"\n  {name}: {error.message}" for name, error in self.failures.items())
        which, them = ("1 model", "it") if len(self.failures) == 1 else (f"{len(self.failures)} models", "them")
        super().__init__(f"{which} could not be loaded (--exit-on-error=false starts without {them}):{lines}")


def obstacles(
    missing: Mapping[str, ModelLifecycle],
    duplicates: Mapping[str, tuple[Path, ...]],
    is_on_demand: Callable[[str], bool],
) -> Iterator[str]:
    """A sentence for each obstacle. `missing` models should serve and do not; `duplicates` are in several repositories.

    A model that was unloaded on request does not count, nor one that is being loaded for the first time, nor one
    that is loaded on demand: requests for it must not make the server unready.
    """
    for name, places in duplicates.items():
        yield f"model '{name}' is in several repositories: {', '.join(map(str, places))}"
    for name, lifecycle in missing.items():
        if not is_on_demand(name):
            rows = "; ".join(str(row) for row in lifecycle.index())
            yield f"model '{name}' does not serve: {rows or 'no version of it was loaded'}"
