"""One load of a model that may already serve: new versions are loaded and swapped in, and old ones are retired.

    plan -> load new versions (old ones serve) -> swap in one loop step -> old ones: stop -> drain -> close

It is one transaction: on failure everything is as before. Event loop thread; blocking work goes to the load pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modelserver.config.on_demand import ReloadMode, reload_mode
from modelserver.config.schema import ModelConfig
from modelserver.errors import SHUTTING_DOWN, ConfigError, InvalidArgumentError, ServerError, UnavailableError
from modelserver.repository.loader import LoadSource, ModelLoader
from modelserver.repository.plan import LoadedVersion, plan_reload
from modelserver.repository.serving import LifecycleContext, ServingVersions, VersionStates
from modelserver.repository.state import VersionsFailedError, describe_failure

logger = logging.getLogger(__name__)

# Runs a function that blocks in the load pool.
InPool = Callable[..., Awaitable[Any]]


def num_instances(config: ModelConfig) -> int:
    """The instances of a config; a group of several GPUs counts once for each in its `count`."""
    return sum(group.count for group in config.instance_group)


def with_instances(config: ModelConfig, number: int) -> ModelConfig:
    """The same config with that many instances, or as many as it has: the first of them."""
    groups = []
    for group in config.instance_group:
        count = min(group.count, number)
        if count:
            groups.append(replace(group, count=count))
        number -= count
    return replace(config, instance_group=tuple(groups))


def can_roll(old: ModelConfig, new: ModelConfig) -> bool:
    """Whether rolling is possible: the version has instances to spare, and no sequences, which are bound to them."""
    return not new.is_ensemble and new.sequence_batching is None and min(num_instances(old), num_instances(new)) > 1


class Rolling:
    """The replacement of one version. Its methods are called from the event loop thread."""

    def __init__(self, in_pool: InPool, loader: ModelLoader, source: LoadSource, old: LoadedVersion) -> None:
        self._in_pool = in_pool
        self._loader = loader
        self._source = source
        self._old = old

    async def begin(self) -> LoadedVersion:
        """The new version with half of its instances; the old one has lost as many. On failure it has them back."""
        config = self._source.definition.config
        total = num_instances(self._old.definition.config)
        fresh: LoadedVersion | None = None
        try:
            fresh = await self._in_pool(self._loader.load, self._part(1), self._old.version)
            for number in range(1, (min(total, num_instances(config)) + 1) // 2 + 1):
                await self._resize(self._old, self._old.definition.config, max(1, total - number))
                if number > 1:
                    await self._resize(fresh, config, number)
        except ServerError:
            await self.undo(fresh)
            raise
        return fresh

    async def undo(self, fresh: LoadedVersion | None) -> None:
        """Restore the old version."""
        if fresh is not None:
            await self._in_pool(self._loader.close, fresh)
        definition = self._old.definition
        try:
            await self._resize(self._old, definition.config, num_instances(definition.config))
        except ServerError as error:
            logger.error(
                "model '%s' version %d serves with fewer instances than before: %s",
                definition.name,
                self._old.version,
                error.message,
            )

    async def finish(self, fresh: LoadedVersion) -> None:
        """The rest of the instances, when the old version is closed. Raises ServerError; existing ones serve."""
        definition = self._source.definition
        for number in range(num_instances(fresh.model.config) + 1, num_instances(definition.config) + 1):
            await self._resize(fresh, definition.config, number)
        fresh.definition = definition

    def _part(self, number: int) -> LoadSource:
        definition = self._source.definition
        return replace(self._source, definition=replace(definition, config=with_instances(definition.config, number)))

    async def _resize(self, loaded: LoadedVersion, config: ModelConfig, number: int) -> None:
        definition = replace(loaded.definition, config=with_instances(config, number))
        await self._in_pool(self._loader.update, loaded, definition)


# How long the second half of a rolling reload waits for the old version to be closed.
_ROLLING_PATIENCE_S = 60.0


@dataclass(slots=True, eq=False)
class Reload:
    """`version` None: the whole model; else `source` covers that version, and the others stay unchanged.

    `check_wanted` raises when the load has become pointless; `is_stopped`: no new version may be loaded any more.
    """

    name: str
    context: LifecycleContext
    serving: ServingVersions
    states: VersionStates
    source: LoadSource
    version: int | None
    check_wanted: Callable[[], None]
    is_stopped: Callable[[], bool]
    # Whether old versions leave before the new ones are loaded, so that requests should wait.
    is_vacated: bool = False

    async def run(self) -> None:
        """Load the versions of the definition and swap them in. Raises ServerError.

        A model that does not fit twice leaves first (`ReloadMode.UNLOAD_FIRST`), and comes back on failure if its
        files are still there.
        """
        serving, definition = self.serving, self.source.definition
        plan = plan_reload(serving.loaded, definition, keeps_others=self.version is not None)
        self.states.loading = plan.load
        replaced = [number for number in plan.load if number in serving.loaded]
        mode = reload_mode(definition.config)
        rollings = self._rollings(replaced) if mode is ReloadMode.ROLLING else {}
        vacated = await self._vacate(replaced) if mode is ReloadMode.UNLOAD_FIRST and replaced else {}
        try:
            fresh = await self._load_versions(plan.load, rollings)
            try:
                await self._prepare_swap(plan.update, fresh.values())
            except ServerError:
                await self._discard(fresh, rollings)
                raise
        except ServerError:
            await self._restore(vacated)
            self.check_wanted()  # a load that an unload has cancelled is not a failure
            raise
        finally:
            self.is_vacated = False
            self._release_held(vacated.values())
        if self.is_stopped():
            for loaded in fresh.values():
                serving.retirement.retire(loaded)
            raise UnavailableError(SHUTTING_DOWN)
        serving.swap(definition, plan, fresh)
        for number, rolling in rollings.items():
            await serving.retirement.wait(_ROLLING_PATIENCE_S)
            await rolling.finish(fresh[number])

    async def _prepare_swap(self, updated: Iterable[int], fresh: Iterable[LoadedVersion]) -> None:
        self.check_wanted()
        await self._update_instances(updated)
        for loaded in fresh:
            error = self.context.bind(self.name, loaded) if loaded.model.is_ensemble else None
            if error is not None:
                # Not a ConfigError, which only a change of the file could fix: the ensemble's models may change.
                raise error if not isinstance(error, ConfigError) else InvalidArgumentError(error.message)

    async def _load_versions(
        self, versions: Iterable[int], rollings: Mapping[int, Rolling]
    ) -> dict[int, LoadedVersion]:
        """All of `versions`, or none: raises when one fails, with Triton's words about each."""
        jobs = {
            version: rollings[version].begin()
            if version in rollings
            else self.context.in_load_pool(self.context.loader.load, self.source, version)
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
            self.states.unloaded |= loaded.keys() - self.serving.loaded.keys()
            raise VersionsFailedError(
                self.name, {version: describe_failure(error) for version, error in failures.items()}
            )
        return loaded

    async def _discard(self, fresh: Mapping[int, LoadedVersion], rollings: Mapping[int, Rolling]) -> None:
        for version, rolling in rollings.items():
            if version in fresh:
                await rolling.undo(fresh[version])
        await self.serving.retirement.close_all(fresh.values())

    async def _update_instances(self, versions: Iterable[int]) -> None:
        loader, loaded = self.context.loader, self.serving.loaded
        updated: list[LoadedVersion] = []
        try:
            for version in versions:
                await self.context.in_load_pool(loader.update, loaded[version], self.source.definition)
                updated.append(loaded[version])
        except ServerError:
            for each in updated:
                await self.context.in_load_pool(loader.update, each, each.definition)
            raise

    def _rollings(self, versions: Iterable[int]) -> dict[int, Rolling]:
        """The rolling replacements of the versions that allow it."""
        loaded = self.serving.loaded
        return {
            version: Rolling(self.context.in_load_pool, self.context.loader, self.source, loaded[version])
            for version in versions
            if can_roll(loaded[version].definition.config, self.source.definition.config)
        }

    # Versions that leave before their successors are loaded.

    async def _vacate(self, versions: Iterable[int]) -> dict[int, LoadedVersion]:
        """Unload replaced versions, and wait until they are closed. Their resources on disk stay held."""
        vacated = {version: self.serving.loaded[version] for version in versions}
        for loaded in vacated.values():
            for resource in loaded.held:
                resource.acquire()
        self.is_vacated = True
        self.serving.remove(vacated)
        await self.serving.retirement.wait()
        return vacated

    async def _restore(self, vacated: Mapping[int, LoadedVersion]) -> None:
        """Load unloaded versions again after their successors failed, if their files are unchanged."""
        for version, loaded in vacated.items():
            if not self.source.is_wanted():
                return
            old = LoadSource(loaded.definition, loaded.held)
            try:
                self.serving.loaded[version] = await self.context.in_load_pool(self.context.loader.load, old, version)
            except ServerError as error:
                logger.error("model '%s' version %d cannot be restored: %s", self.name, version, error.message)
            else:
                logger.info("model '%s' version %d is back", self.name, version)

    def _release_held(self, versions: Iterable[LoadedVersion]) -> None:
        for loaded in versions:
            for resource in loaded.held:
                self.context.close_pool.submit(resource.release)
