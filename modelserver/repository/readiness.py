"""Why a repository that has started is not ready: models that should serve and do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from modelserver.repository.lifecycle import ModelLifecycle


def obstacles(
    lifecycles: Mapping[str, ModelLifecycle],
    duplicates: Mapping[str, tuple[Path, ...]],
    is_on_demand: Callable[[str], bool],
) -> Iterator[str]:
    """A sentence for each of them. `duplicates` lie in several repositories, where that matters.

    A model that was unloaded on request does not count, nor one that is being loaded for the first time, nor one
    that is loaded on demand: requests for it must not make the server unready.
    """
    for name, places in duplicates.items():
        yield f"model '{name}' is in several repositories: {', '.join(map(str, places))}"
    for name, lifecycle in lifecycles.items():
        if not lifecycle.is_as_wanted and not is_on_demand(name):
            rows = "; ".join(str(row) for row in lifecycle.index())
            yield f"model '{name}' does not serve: {rows or 'no version of it was loaded'}"
