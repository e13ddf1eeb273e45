"""What is loaded when the server starts, and what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from modelserver.errors import AlreadyExistsError, InvalidArgumentError, ServerError
from modelserver.repository.model_name import check_model_name
from modelserver.repository.namespaces import Namespaces
from modelserver.repository.options import ControlMode, RepositoryOptions
from modelserver.repository.roots import duplicate_reason


def names_at_start(options: RepositoryOptions, namespaces: Namespaces, found: Sequence[str]) -> list[str]:
    """The keys of the models to load, of those `found` or not: all, or those that `--load-model` names.

    Raises InvalidArgumentError for names that no model can have, and for others beside `*`.
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
    """Load these models side by side, but for `duplicates`; those that could not be, by key, and why."""
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
