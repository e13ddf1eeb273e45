"""The versions of one model: those that serve, and the state of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from modelserver.errors import ConfigError, ServerError, UnavailableError
from modelserver.execution.model import Model
from modelserver.repository.definition import ModelDefinition
from modelserver.repository.loader import ModelLoader
from modelserver.repository.override_store import OverrideStore
from modelserver.repository.plan import LoadedVersion, ReloadPlan
from modelserver.repository.retirement import Retirement
from modelserver.repository.state import UNLOADED, IndexEntry, ModelState, VersionsFailedError, describe_failure

Result = TypeVar("Result")

# Ready models by version; None is the highest one. Replaced as a whole, never changed.
ReadyTable = Mapping[int | None, "Model"]


async def _no_ensembles(name: str, _definition: ModelDefinition) -> None:
    raise UnavailableError(f"model '{name}': ensembles are not available here")


def _unbound(name: str, _loaded: LoadedVersion) -> ServerError:
    return UnavailableError(f"model '{name}': ensembles are not available here")


@dataclass(frozen=True, slots=True)
class LifecycleContext:
    """`compose` loads the models that an ensemble needs, `bind` lets it call those that serve now (see `ensembles`).

    `publish` makes a ready table what `get` answers from (empty: the model is gone). `force_close` is set
    when the wait for requests in flight must end. `unload_grace_s` is `--unload-grace-secs`.
    """

    loader: ModelLoader
    load_pool: Executor
    close_pool: Executor
    publish: Callable[[str, ReadyTable], None]
    force_close: asyncio.Event
    compose: Callable[[str, ModelDefinition], Awaitable[None]] = _no_ensembles
    bind: Callable[[str, LoadedVersion], ServerError | None] = _unbound
    overrides: OverrideStore | None = None
    unload_grace_s: float = 0.0

    async def in_load_pool(self, function: Callable[..., Result], *args: object) -> Result:
        """Run a blocking function in the pool. Event loop thread."""
        return await asyncio.get_running_loop().run_in_executor(self.load_pool, function, *args)


logger = logging.getLogger(__name__)


class ServingVersions:
    """`loaded` are the loaded versions, replaced as a whole; `retirement` holds the leaving ones.

    `mismatched` are ensembles whose models are loaded but do not fit. `on_closed` is called for each version.
    """

    def __init__(self, name: str, context: LifecycleContext, on_closed: Callable[[int], None]) -> None:
        self.loaded: dict[int, LoadedVersion] = {}
        self.mismatched: set[int] = set()
        self.retirement = Retirement(
            name,
            close_pool=context.close_pool,
            close=context.loader.close,
            force_close=context.force_close,
            grace_s=context.unload_grace_s,
            on_closed=on_closed,
        )
        self._name = name
        self._context = context

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are ready, ascending."""
        return tuple(sorted(version for version, loaded in self.loaded.items() if not loaded.model.fault))

    @property
    def models(self) -> list[Model]:
        """The ready models, ascending by version."""
        return [self.loaded[version].model for version in self.versions]

    @property
    def ensembles(self) -> list[LoadedVersion]:
        """The loaded versions that are ensembles, whether or not their models are there."""
        return [loaded for loaded in self.loaded.values() if loaded.model.is_ensemble]

    def publish(self) -> None:
        """Publish the ready versions to requests."""
        versions = self.versions
        table: dict[int | None, Model] = {version: self.loaded[version].model for version in versions}
        if versions:
            table[None] = table[versions[-1]]
        self._context.publish(self._name, table)

    def swap(self, definition: ModelDefinition, plan: ReloadPlan, fresh: Mapping[int, LoadedVersion]) -> None:
        """Swap in the new versions atomically between two requests: no await here."""
        replaced = [self.loaded[version] for version in (*plan.load, *plan.retire) if version in self.loaded]
        for version in plan.update:
            loaded = self.loaded[version]
            if loaded.definition.config.dynamic_batching != definition.config.dynamic_batching:
                loaded.model.update_scheduling(definition.config)
                logger.info("model '%s' version %d follows another dynamic_batching in place", self._name, version)
        for version in (*plan.keep, *plan.update):
            self.loaded[version].definition = definition
        gone = {*plan.load, *plan.retire}
        self.loaded = {version: loaded for version, loaded in self.loaded.items() if version not in gone} | {**fresh}
        self.mismatched -= gone
        self.publish()
        for loaded in replaced:
            self.retirement.retire(loaded)
        # The clause is Triton's: scripts wait for it in the log.
        logger.info("successfully loaded '%s', which serves versions %s", self._name, list(self.versions))

    def remove(self, versions: Iterable[int]) -> None:
        """Stop these versions at once, if they are loaded; they drain and close in the background."""
        removed = {version: self.loaded[version] for version in versions if version in self.loaded}
        self.loaded = {version: loaded for version, loaded in self.loaded.items() if version not in removed}
        self.publish()
        for loaded in removed.values():
            self.retirement.retire(loaded)

    def bind(self, loaded: LoadedVersion) -> ServerError | None:
        """Let an ensemble call the models that serve now. Returns the reason if it cannot."""
        error = self._context.bind(self._name, loaded)
        self.mismatched.discard(loaded.version)
        if isinstance(error, ConfigError):
            self.mismatched.add(loaded.version)
        return error

    def rebind(self) -> None:
        """The models of an ensemble have changed: call the new ones, or do not serve."""
        for loaded in self.ensembles:
            before = (loaded.model.fault, loaded.model.composing)
            self.bind(loaded)
            if before[0] != loaded.model.fault:
                verb = f"cannot serve: {loaded.model.fault}" if loaded.model.fault else "serves again"
                logger.info("ensemble '%s' version %d %s", self._name, loaded.version, verb)
            if before != (loaded.model.fault, loaded.model.composing):
                self.publish()


class VersionStates:
    """`loading` are the versions that a load brings up, once it knows; `is_loading` from its begin to its end.

    `unloaded` are versions that served, or would have if other versions had not failed. `note` is the reason text of
    ready versions: the override by which they serve.
    """

    def __init__(self, name: str) -> None:
        self.loading: tuple[int, ...] = ()
        self.is_loading = False
        self.unloaded: set[int] = set()
        self.note = ""
        self._name = name
        # Why the last load failed: by version, or under None when no version was reached.
        self._failures: dict[int | None, str] = {}

    def note_failure(self, error: ServerError, version: int | None, loaded: Collection[int]) -> None:
        """Record a failed load of that version, or of all; `loaded` versions still serve."""
        self.forget_failures(version)
        if isinstance(error, VersionsFailedError):
            self._failures.update(error.reasons.items())
        elif version is None or version in loaded:
            self._failures[version] = describe_failure(error)

    def forget_failures(self, version: int | None) -> None:
        """Drop the recorded states when another operation on that version, or all, begins."""
        if version is None:
            self._failures = {}
        else:
            self._failures = {key: reason for key, reason in self._failures.items() if key not in (None, version)}

    def index(self, loaded: Mapping[int, LoadedVersion], retiring: Iterable[LoadedVersion]) -> list[IndexEntry]:
        """One row per known version, ascending; one without a version if none is known."""
        general = self._failures.get(None, "")
        rows: dict[int, tuple[ModelState, str]] = {}
        rows |= dict.fromkeys(self.unloaded, (ModelState.UNAVAILABLE, general or UNLOADED))
        rows |= {
            version: (ModelState.UNAVAILABLE, reason)
            for version, reason in self._failures.items()
            if version is not None
        }
        rows |= {each.version: (ModelState.UNLOADING, each.leaving) for each in retiring}
        rows |= dict.fromkeys(self.loading, (ModelState.LOADING, ""))
        rows |= {version: (ModelState.READY, self._failures.get(version, general) or self.note) for version in loaded}
        rows |= {
            version: (ModelState.UNAVAILABLE, each.model.fault) for version, each in loaded.items() if each.model.fault
        }
        if rows:
            return [IndexEntry(self._name, version, *rows[version]) for version in sorted(rows)]
        if self.is_loading:
            return [IndexEntry(self._name, None, ModelState.LOADING)]
        state = ModelState.UNAVAILABLE if general else ModelState.UNKNOWN
        return [IndexEntry(self._name, None, state, general)]
