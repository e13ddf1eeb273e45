"""A reload instance by instance: the new version grows as the old one shrinks, with at most one extra instance.

The first half of the new instances is made while the old version serves with its remaining instances. Then the new
version takes over, and the other half follows when the old version is closed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from modelserver.config.schema import ModelConfig
from modelserver.errors import ServerError
from modelserver.repository.loader import LoadSource, ModelLoader
from modelserver.repository.plan import LoadedVersion

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
