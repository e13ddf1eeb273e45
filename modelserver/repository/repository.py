"""The model repository: maps name and version to a ready model, and controls loads and unloads.

Everything here runs on the event loop thread; reading, loading and closing are done by pools of threads.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelserver.backend import ModelConfig, ServerCalls
from modelserver.errors import (
    SHUTTING_DOWN,
    AlreadyExistsError,
    InvalidArgumentError,
    LoadOnDemandError,
    ServerError,
    UnavailableError,
    UnsupportedError,
)
from modelserver.execution.model import Model
from modelserver.execution.shared_resources import SharedResources
from modelserver.repository.archives import Archives
from modelserver.repository.catalog import Catalog
from modelserver.repository.definition import read_on_demand_configs, read_unloaded, size_on_disk
from modelserver.repository.ensembles import Ensembles
from modelserver.repository.lifecycles import AS_KEPT, Lifecycles, StartupError, load_all, names_at_start, obstacles
from modelserver.repository.load_request import LoadRequest
from modelserver.repository.loader import LoadModel, ModelLoader
from modelserver.repository.mounts import Mounts
from modelserver.repository.namespaces import Namespaces, check_model_name
from modelserver.repository.on_demand import OnDemandModels, RepositoryAccess
from modelserver.repository.operations import RepositoryPools, all_of
from modelserver.repository.options import ControlMode, RepositoryOptions, place_of
from modelserver.repository.override_store import OverrideStore, check_storable
from modelserver.repository.poller import Poller, PollScan
from modelserver.repository.roots import name_roots, open_further_roots, open_roots
from modelserver.repository.state import IndexEntry, named_failure
from modelserver.repository.table import ModelTable
from modelserver.repository.traffic import Traffic, TrafficTable
from modelserver.repository.traffic_control import TrafficControl
from modelserver.store.names import DEFAULT_TAG, parse_name
from modelserver.store.store import Store
from modelserver.telemetry.counts import LoadCounts

logger = logging.getLogger(__name__)

# Time for closing after the drain timeout, before models are left to the end of the process.
_CLOSE_GRACE_S = 1.5
# Between looks at the manifests of a model store, on which other processes work.
_STORE_POLL_S = 2.0


class _Phase(enum.Enum):
    """STARTING -> SERVING -> STOPPING, or STARTING -> STOPPING. The values say why a request is refused."""

    STARTING = "the server is starting"
    SERVING = ""
    STOPPING = SHUTTING_DOWN


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts that load and change models, all made when the roots are open."""

    loader: ModelLoader
    models: Lifecycles
    mounts: Mounts
    archives: Archives
    traffic: TrafficControl
    overrides: OverrideStore | None


class ModelRepository:
    """All models of the server. Made before the event loop runs, used from its thread only."""

    def __init__(
        self,
        options: RepositoryOptions,
        *,
        load_model: LoadModel | None = None,
        resources: SharedResources | None = None,
    ) -> None:
        self._options = options
        self._resources = resources
        self._load_model = load_model
        self._table = ModelTable(Namespaces())
        self._lifecycles = self._table.lifecycles
        self._ready = self._table.ready  # the hot path of every request
        self._ensembles = Ensembles(
            self._table,
            self._ensure_loaded,
            lambda: self._catalog.scan.names,
            max_steps=options.definition.limits.ensemble_steps,
        )
        self._pools = RepositoryPools(options.load_thread_count)
        self._catalog = Catalog((), "")
        self._phase = _Phase.STARTING
        self._opened: _Parts | None = None
        self._poller: Poller | None = None  # of the polling mode
        self._follower: asyncio.Task[None] | None = None  # of a model store
        self._unloads: set[asyncio.Task[None]] = set()  # of models that the store has no more
        self.on_demand = OnDemandModels(
            options.demand,
            self._table,
            RepositoryAccess(
                load=self._ensure_loaded,
                refresh=self._refresh,
                scan=lambda: self._catalog.scan,
                describe=functools.partial(self._pools.in_scan, read_on_demand_configs),
                size=functools.partial(self._pools.in_scan, size_on_disk),
                users=self._ensembles.users,
            ),
        )
        self.traffic = TrafficTable()
        self._registering = asyncio.Lock()
        self._following = asyncio.Lock()  # who asks for models sees all that the store has
        # The model store whose models are served too, if any.
        self.store = Store(options.store) if options.store is not None else None

    # Lookups by requests.

    def get(self, name: str, version: int | None) -> Model:
        """The ready model; `version` None is the highest ready one.

        Raises NotFoundError for an unknown model or version, LoadOnDemandError for a model that is loaded on demand,
        and UnavailableError, with state and reason, for any other model that is not ready.
        """
        try:
            return self._ready[name][version]
        except KeyError:
            if (canonical := self._canonical(name)) != name:
                return self.get(canonical, version)
            unloaded = self.on_demand.unloaded_error(name, version)
            raise unloaded or self._table.missing(name, version, self._catalog.scan) from None

    def directories(self, name: str) -> tuple[Path, ...]:
        """Of the version that answers for the model, or that would be loaded for it; then of the model. As `get`."""
        try:
            return self.get(name, None).directories
        except LoadOnDemandError:
            layout = self._catalog.scan.models.get(self._canonical(name))
            if layout is None or not layout.versions or layout.remote is not None:
                raise
            return layout.versions[max(layout.versions)], layout.directory

    def sequence_holder(self, name: str, version: int | None, sequence_id: int | str) -> Model | None:
        """The model on which a sequence is under way, if any: the sequence continues there after a reload."""
        return self._table.sequence_holder(self._canonical(name), version, sequence_id)

    def ready_versions(self, name: str) -> tuple[int, ...]:
        """The ready versions, ascending; empty for a model that is not ready or not known."""
        return self._table.ready_versions(self._canonical(name))

    def models(self) -> tuple[Model, ...]:
        """Every ready version of every model, by name and version: the same tuple until one of them changes."""
        return self._table.models

    def index(self, repository: str = "") -> list[IndexEntry]:
        """A row for every version of every model, including models on disk that were never loaded.

        With `repository`, only its models; raises NotFoundError for an unknown repository.
        """
        if repository:
            self._table.namespaces.check(repository)
        if self._options.control_mode is ControlMode.EXPLICIT and self._phase is not _Phase.STARTING:
            self._catalog.refresh()
            if self._phase is _Phase.SERVING:
                self._catalog.list_clouds_later(self._pools.scan, self._options.poll_interval_s)
        return self.on_demand.annotate(self._table.index_rows(self._catalog.scan, repository))

    async def unloaded_configs(self) -> list[ModelConfig]:
        """The configs of unloaded models on demand, as far as they are known without a load."""
        if self._options.store is not None:
            await self._follow_store()
        if not self.on_demand.is_active:
            return []
        layouts = [each for each in self._catalog.scan.models.values() if self.on_demand.can_load(each.name, None)]
        return await self._pools.in_scan(read_unloaded, layouts, self._options.definition) if layouts else []

    def is_ready(self, strict: bool) -> bool:
        """Whether the start is over and, if `strict`, every model that should serve does.

        See `obstacles` for the models that do not count.
        """
        return next(self._obstacles(strict), None) is None

    def unready_because(self, strict: bool) -> list[str]:
        """A sentence for each reason why `is_ready` is false; empty when it is true."""
        return list(self._obstacles(strict))

    def _obstacles(self, strict: bool) -> Iterator[str]:
        if self._phase is not _Phase.SERVING:
            is_starting = self._phase is _Phase.STARTING
            yield "models are being loaded for the first time" if is_starting else self._phase.value
            return
        if strict:
            is_explicit = self._options.control_mode is ControlMode.EXPLICIT
            duplicates = {} if is_explicit else self._catalog.scan.duplicates
            yield from obstacles(self._table.missing_models, duplicates, self.on_demand.lru.is_on_demand)

    def load_counts(self) -> dict[str, LoadCounts]:
        """Loads and failures of every model with at least one load request. From any thread."""
        return {name: lifecycle.counts for name, lifecycle in self._lifecycles.copy().items()}

    # Start and stop.

    async def start(self, server: ServerCalls | None = None) -> dict[str, ServerError]:
        """Load the models that the control mode selects; returns the models that could not be loaded and why.

        `server` is the backends' interface to the server. Raises NotFoundError if a root is not a directory and, with
        `is_exit_on_error`, StartupError for models that could not be loaded. Call `stop` in any case.
        """
        options = self._options
        if not options.roots and options.store is None:
            raise InvalidArgumentError("no model repository: give one by --model-repository")
        parts = self._opened = await self._open(server)
        await parts.traffic.restore()
        try:
            survey = await self._pools.in_scan(self._catalog.survey)
        except OSError as error:
            raise UnavailableError(f"the model repository cannot be read: {error}") from error
        await self.on_demand.survey(tuple(survey.scan.models.values()))
        failures = await self._load_at_start(parts, survey.scan.names)
        if failures and options.is_exit_on_error:
            raise StartupError(failures)
        if self._phase is _Phase.STARTING:
            self._phase = _Phase.SERVING
        if options.control_mode is ControlMode.POLL:
            self._poller = Poller(
                self._poll_scan, self._load_from_disk, self._unload_gone, interval_s=options.poll_interval_s
            )
            self._poller.start(survey.fingerprints, failures)
        if options.store is not None:
            self._catalog.take_store_changes()  # those of the first scan
            self.on_demand.finds_new = True
            self._follower = asyncio.create_task(self._keep_following_store(), name="model store")
        return failures

    async def _open(self, server: ServerCalls | None) -> _Parts:
        """Open the roots, and make the parts that load models from them."""
        options = self._options
        roots = await self._pools.in_scan(open_roots, options)
        self._table.namespaces = Namespaces([root.name for root in roots], is_on=options.has_namespaces)
        self._catalog = Catalog(roots, options.definition.config_name)
        overrides: OverrideStore | None = None
        if options.override_directory is not None:
            overrides = await self._pools.in_scan(OverrideStore, options.override_directory)
        loader = ModelLoader(
            roots,
            options.definition,
            self._load_model or self._model_loader(server),
            num_retries=options.load_retry_count,
            overrides=overrides,
            find_config=self._ensembles.find_config,
        )
        models = Lifecycles(
            self._table,
            loader,
            self._pools,
            ensembles=self._ensembles,
            on_demand=self.on_demand,
            traffic=self.traffic,
            overrides=overrides,
            unload_grace_s=options.unload_grace_s,
        )
        mounts = Mounts(self._catalog, loader, self._table, self._pools.scan)
        archives = Archives(self._catalog, mounts, self._table, self._pools.scan, models.of)
        traffic = TrafficControl(
            self.traffic, self._table, self._catalog, loader, self._pools, options.override_directory
        )
        return _Parts(loader, models, mounts, archives, traffic, overrides)

    async def stop(self, timeout_s: float) -> None:
        """Unload everything: wait up to `timeout_s` for requests in flight, then close them anyway.

        Raises TimeoutError when a model could not even be closed in time; it is left to the process's end.
        """
        self._phase = _Phase.STOPPING
        if self._opened is not None:
            self._opened.models.is_stopping = True
        if self._poller is not None:
            await self._poller.stop()
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait([self._follower, *self._unloads])
        await self.on_demand.stop()
        for lifecycle in self._lifecycles.values():
            lifecycle.stop()
        waiting: dict[asyncio.Future[None], str] = {}
        for name, lifecycle in self._lifecycles.items():
            waiting[asyncio.ensure_future(lifecycle.wait_idle())] = name
        try:
            left = await _wait(waiting, timeout_s)
            if self._opened is not None:
                self._opened.models.force_close.set()
            left = await _wait(left, _CLOSE_GRACE_S)
        finally:
            late = [name for task, name in waiting.items() if not task.done()]
            self._abandon(late)
        if left:
            names = ", ".join(sorted(waiting[task] for task in left))
            raise TimeoutError(f"models still busy after {timeout_s + _CLOSE_GRACE_S:.1f} s: {names}")

    # Control.

    async def load(
        self,
        name: str,
        *,
        config_json: str | None = None,
        files: Mapping[str, bytes] | None = None,
        version: int | None = None,
        persists: bool | None = None,
        drops_override: bool = False,
        keep_alive_s: float | None = None,
        repository: str = "",
    ) -> None:
        """Load or reload a model on request, or one version of it; returns when it serves.

        With namespaces, `repository` chooses one; without it all models of that name are loaded, as in Triton.
        A version that was loaded by number is served, despite the version policy, until the next load without one.
        `config_json` replaces its config file; `files` (path relative to the model directory -> content)
        replace its whole directory and need `config_json`. `persists` stores that for later starts, or with False
        deletes the stored override. A config that replaced the file before stays if the files are unchanged,
        unless `drops_override`. `keep_alive_s` is how long a model on demand stays without requests, until the next
        load; for other models it raises InvalidArgumentError. Raises UnavailableError unless the control
        mode is explicit, NotFoundError for a model that no root holds, and ServerError, the old versions
        still serving, for a load that fails.
        """
        self._check_explicit("load")
        name = self._canonical(name)
        check_model_name(name)
        with named_failure(name):
            request = LoadRequest(config_json, dict(files) if files else None, version, persists, drops_override)
        if persists:
            self._check_storable(name)
        with named_failure(name):
            keys = await self._keys_to_load(name, repository, is_new=bool(request.files))
            for key in keys:
                if not request.files and (version is not None or key not in self._lifecycles):
                    await self._parts.models.check_exists(key, version)
                self.on_demand.keep(key, keep_alive_s)
            await all_of(asyncio.shield(self._parts.models.of(key).load(request)) for key in keys)

    async def reload(self, name: str) -> None:
        """Load a model that the program around the server has changed or added, whatever the control mode.

        Returns when it serves. Raises NotFoundError for a model that no root holds, and ServerError, the old versions
        still serving, for a load that fails.
        """
        await self._pools.in_scan(self._catalog.refresh)
        await self._parts.models.check_exists(name, None)
        await asyncio.shield(self._parts.models.of(name).load(LoadRequest()))

    async def unload(
        self,
        name: str,
        *,
        unload_dependents: bool = False,
        version: int | None = None,
        repository: str = "",
        evicts: bool = False,
    ) -> None:
        """Unload a model on request, or one version of it; returns when it takes no more requests.

        A model or version that is not loaded is not an error. A model on demand stays unloaded until a load request, or
        with `evicts` until any request for it; requests that already wait for it are served before it leaves.

        `unload_dependents` also unloads the models of an ensemble's steps, except models that another ensemble needs.
        Raises UnavailableError unless the control mode is explicit, or only models on demand are evicted.
        """
        name = self._canonical(name)
        check_model_name(name)
        named = self._table.namespaces.named(name, repository)
        keys = self._table.namespaces.keys(named, self._lifecycles)
        if not evicts or not all(map(self.on_demand.lru.is_on_demand, keys)):
            self._check_explicit("unload")
        if unload_dependents:
            keys += [composing for key in tuple(keys) for composing in self._ensembles.only_of(key)]
        await all_of(self._parts.models.unload(key, version, evicts=evicts) for key in dict.fromkeys(keys))

    def keep(self, name: str, keep_alive_s: float) -> None:
        """Set how long a model on demand stays in memory without requests, until the next load; inf is for ever.

        Raises InvalidArgumentError for a model that is not on demand. The control mode does not matter.
        """
        name = self._canonical(name)
        check_model_name(name)
        for key in self._table.namespaces.keys(self._table.namespaces.named(name, ""), self._lifecycles):
            self.on_demand.keep(key, keep_alive_s)

    async def set_traffic(self, name: str, traffic: Traffic | None, *, persists: bool = False) -> None:
        """Set which versions of a model answer its requests and get copies of them; None restores the default.

        `persists` keeps it across restarts; removing the traffic also deletes the stored one. Raises
        NotFoundError for an unknown model, InvalidArgumentError for a version that is neither ready nor on
        disk, and if the server has no directory for stored traffic.
        """
        check_model_name(name)
        parts = self._parts
        await self._refresh()
        await parts.traffic.set(name, traffic, persists=persists)

    async def register(self, repository: str, aliases: Mapping[str, str] | None = None) -> None:
        """Find the models of a further repository, as `--model-repository` takes it; they are loaded on request.

        `aliases` are names of models by their directories. Raises UnsupportedError unless the control mode is explicit,
        AlreadyExistsError for a repository that is there, and as `open_further_roots`.
        """
        self._check_changes_roots("add")
        place = place_of(repository)
        mounts = self._parts.mounts
        async with self._registering:
            if any(root.given == place for root in mounts.roots):
                raise AlreadyExistsError(f"model repository '{repository}' has already been registered")
            opened = await self._pools.in_scan(open_further_roots, place, self._options, dict(aliases or {}))
            taken = self._table.namespaces.repositories
            roots = name_roots(opened, are_namespaces=self._options.has_namespaces, taken=taken)
            await mounts.add(roots)
        scan = self._catalog.scan.models
        await self.on_demand.survey([scan[key] for key in mounts.keys(roots) if key in scan])

    async def unregister(self, repository: str) -> None:
        """Take away a repository, of the start or of `register`, and unload its models.

        Returns when their requests are answered. Raises UnsupportedError unless the control mode is explicit,
        InvalidArgumentError for a repository that is not there.
        """
        self._check_changes_roots("remove")
        place = place_of(repository)
        mounts = self._parts.mounts
        roots = [root for root in mounts.roots if root.given == place]
        if not roots:
            raise InvalidArgumentError(
                f"failed to unregister '{repository}', repository not found: give the path by which it was registered"
            )
        await mounts.remove(roots)

    async def add_archive(self, name: str, directory: Path) -> None:
        """Load a model, or an ensemble with its models, from a directory outside the repositories, under this name.

        Returns when it serves; a failure leaves nothing behind. Raises UnavailableError unless the control mode is
        explicit, and as `Archives.add`.
        """
        self._check_explicit("load")
        check_model_name(name)
        await self._parts.archives.add(name, directory)

    async def remove_archive(self, name: str) -> None:
        """Unload an archive of `add_archive`; returns when it is closed. Raises as `Archives.remove`."""
        self._check_explicit("unload")
        await self._parts.archives.remove(name)

    def archives(self) -> Mapping[str, Path]:
        """The serving models of archives, and their directories."""
        return self._opened.archives.directories if self._opened is not None else {}

    # Implementation.

    async def _keys_to_load(self, name: str, repository: str, *, is_new: bool) -> list[str]:
        """The models that a request to load `name` means: with namespaces, the models of that name in all of them."""
        named = self._table.namespaces.named(name, repository)
        if not self._table.namespaces.is_on or self._table.namespaces.split(named)[0]:
            return [named]
        await self._pools.in_scan(self._catalog.refresh)
        keys = self._table.namespaces.keys(named, {*self._lifecycles, *self._catalog.scan.names})
        if is_new and len(keys) != 1:
            raise InvalidArgumentError(
                f"model '{name}': choose the repository for its files by 'repository' or '<repository>::{name}'; "
                f"there are: {', '.join(self._table.namespaces.repositories)}"
            )
        return keys or [named]

    @property
    def _parts(self) -> _Parts:
        if self._opened is None:
            raise UnavailableError(self._phase.value)
        return self._opened

    async def _ensure_loaded(self, key: str) -> None:
        await self._parts.models.ensure_loaded(key)

    async def _load_at_start(self, parts: _Parts, found: Sequence[str]) -> dict[str, ServerError]:
        keys = names_at_start(self._options, self._table.namespaces, found)
        if parts.overrides is not None:
            keys = sorted({*keys, *await self._pools.in_scan(parts.overrides.names)})
        if self._options.control_mode is not ControlMode.EXPLICIT or "*" in self._options.load_models:
            # Models named by --load-model are loaded; * is not a name.
            keys = [key for key in keys if not self.on_demand.starts_unloaded(key)]
        return await load_all(keys, self._catalog.scan.duplicates, lambda key: parts.models.of(key).load(AS_KEPT))

    def _check_explicit(self, verb: str) -> None:
        if self._phase is not _Phase.SERVING:
            raise UnavailableError(self._phase.value)
        self._options.control_mode.check_explicit(verb)

    def _check_changes_roots(self, verb: str) -> None:
        if self._phase is not _Phase.SERVING:
            raise UnavailableError(self._phase.value)
        if self._options.control_mode is not ControlMode.EXPLICIT:
            raise UnsupportedError(
                f"to {verb} a model repository while the server runs, start it with --model-control-mode=explicit"
            )

    def _check_storable(self, name: str) -> None:
        if self._parts.overrides is None:
            raise InvalidArgumentError(
                "load parameter 'persist': start the server with --override-directory, a directory for stored overrides"
            )
        check_storable(name)

    async def _poll_scan(self) -> PollScan:
        return (await self._pools.in_scan(self._catalog.survey)).fingerprints

    async def _refresh(self) -> None:
        """Look for models that were added to the repository."""
        if self._options.control_mode is ControlMode.EXPLICIT or self._options.store is not None:
            await self._pools.in_scan(self._catalog.refresh)

    # A model store.

    def _canonical(self, name: str) -> str:
        """The repository's name for a model of the store, which requests may also name as Ollama does."""
        if self._options.store is None or not ("/" in name or name.endswith(f":{DEFAULT_TAG}")):
            return name
        try:
            return parse_name(name).repository_name
        except InvalidArgumentError:
            return name

    async def _keep_following_store(self) -> None:
        while True:
            await asyncio.sleep(_STORE_POLL_S)
            try:
                await self._follow_store()
            except Exception:
                logger.exception("following the model store failed; it is tried again")

    async def _follow_store(self) -> None:
        """Take models that were added to the store, and unload those that were removed or replaced."""
        async with self._following:
            await self._pools.in_scan(self._catalog.refresh)
            changes = self._catalog.take_store_changes()
            scan = self._catalog.scan.models
            await self.on_demand.survey(scan[key] for key in changes.added | changes.changed if key in scan)
            for key in changes.added | changes.changed:
                self.on_demand.keep(key, None)  # also if it was removed before, or has failed to load
            for key in (changes.removed | changes.changed) & self._lifecycles.keys():
                unload = asyncio.create_task(self._unload_stored(key, evicts=key in changes.changed))
                self._unloads.add(unload)
                unload.add_done_callback(self._unloads.discard)

    async def _unload_stored(self, key: str, *, evicts: bool) -> None:
        logger.info("model '%s' %s in the store: it is unloaded", key, "has changed" if evicts else "is no longer")
        try:
            await self._parts.models.unload(key, None, evicts=evicts)
        except ServerError as error:
            logger.warning("model '%s' could not be unloaded: %s", key, error.message)

    async def _load_from_disk(self, name: str) -> None:
        lifecycle = self._lifecycles.get(name)
        if (lifecycle is None or not lifecycle.versions) and self.on_demand.starts_unloaded(name):
            return  # it is read at the first request
        await asyncio.shield(self._parts.models.of(name).load(AS_KEPT))

    async def _unload_gone(self, name: str) -> None:
        logger.info("model '%s' is gone from the repository", name)
        if name in self._lifecycles:
            await asyncio.shield(self._lifecycles[name].unload())

    def _model_loader(self, server: ServerCalls | None) -> LoadModel:
        return functools.partial(
            Model.load,
            loop=asyncio.get_running_loop(),
            default_max_queue_size=self._options.default_max_queue_size,
            resources=self._resources,
            server=server,
        )

    def _abandon(self, late: Sequence[str]) -> None:
        """Cancel the tasks that the timeout has left running, if any."""
        for name in late:
            self._lifecycles[name].cancel()
        if self._opened is not None:
            loader = self._opened.loader
            for loaded in loader.abandon():
                self._pools.close.submit(loader.close, loaded)
        self._pools.shutdown(waits=not late)


async def _wait(tasks: Mapping[asyncio.Future[None], str], timeout_s: float) -> dict[asyncio.Future[None], str]:
    """The tasks that are not done after `timeout_s`."""
    if not tasks:
        return {}
    _, pending = await asyncio.wait(tasks, timeout=timeout_s)
    return {task: tasks[task] for task in pending}
