"""Shared parts of the lifecycles of a repository's models: pools, the loader, and callbacks about served models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from modelserver.errors import ServerError, UnavailableError
from modelserver.repository.definition import ModelDefinition
from modelserver.repository.loader import ModelLoader
from modelserver.repository.override_store import OverrideStore
from modelserver.repository.plan import LoadedVersion

if TYPE_CHECKING:
    from modelserver.execution.model import Model

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
