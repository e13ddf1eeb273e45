"""The models to load at start, their failures, and the reasons why a started repository is not ready."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from modelserver.errors import AlreadyExistsError, InvalidArgumentError, ServerError
from modelserver.repository.lifecycle import ModelLifecycle
from modelserver.repository.namespaces import Namespaces, check_model_name
from modelserver.repository.options import ControlMode, RepositoryOptions
from modelserver.repository.roots import duplicate_reason


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
