"""The differences between two model configs, as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from modelserver.config.message import config_to_json
from modelserver.config.schema import ModelConfig

_LONGEST_VALUE = 80
_ABSENT = "(none)"


def config_changes(old: ModelConfig, new: ModelConfig) -> tuple[str, ...]:
    """One `path: old -> new` for each field that differs, sorted by path; paths are those of the config as JSON."""
    before, after = dict(_leaves("", config_to_json(old))), dict(_leaves("", config_to_json(new)))
    paths = sorted(before.keys() | after.keys())
    return tuple(
        f"{path}: {before.get(path, _ABSENT)} -> {after.get(path, _ABSENT)}"
        for path in paths
        if before.get(path) != after.get(path) and not _is_filled(path, paths)
    )


def _is_filled(path: str, paths: Sequence[str]) -> bool:
    """Whether one of the configs has fields below `path` and the other has none."""
    return any(other.startswith((f"{path}.", f"{path}[")) for other in paths)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every value that is not an object, and every list without objects, by its path."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(f"{path}[{index}]", inner)
    else:
        text = orjson.dumps(value).decode()
        yield path, text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
