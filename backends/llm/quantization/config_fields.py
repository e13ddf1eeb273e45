"""Fields of `quantization_config`, checked. A wrong one is named, with what this version reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from modelserver.backend import InvalidArgumentError, UnsupportedError


def checkpoints_only(method: str, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The config of a format that is only read. UnsupportedError where the option `quantization` asks for it."""
    if config is None:
        raise UnsupportedError(f"quantization {method!r} is read from checkpoints; plain weights are not made into it")
    return config


def integer(
    config: Mapping[str, Any],
    key: str,
    allowed: Sequence[int] | None = None,
    *,
    method: str,
    default: int | None = None,
) -> int:
    """InvalidArgumentError for anything but an integer, UnsupportedError for one that is not among the `allowed`."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"quantization_config.{key} of {method} must be an integer, got {value!r:.80}")
    if allowed is not None and value not in allowed:
        known = ", ".join(map(str, allowed))
        raise UnsupportedError(f"quantization_config.{key} {value} of {method} is not supported: expected {known}")
    return value


def one_of(config: Mapping[str, Any], key: str, allowed: Sequence[str], *, default: str, method: str) -> str:
    """The lower-case value of a field; absent or null: the default. UnsupportedError for any that is not `allowed`."""
    value = config.get(key)
    name = default if value is None else str(value).lower()
    if name not in allowed:
        raise UnsupportedError(
            f"quantization_config.{key} {name!r:.80} of {method} is not supported: expected {', '.join(allowed)}"
        )
    return name


def names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names; absent or null: none. InvalidArgumentError for anything else."""
    value = config.get(key) or ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, str) for one in value):
        raise InvalidArgumentError(f"quantization_config.{key} must be a list of names, got {value!r:.80}")
    return tuple(value)


def fits(pattern: str, name: str) -> bool:
    """Whether a module's name begins with what a regular expression describes. InvalidArgumentError if it is none."""
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise InvalidArgumentError(
            f"quantization_config has the pattern {pattern!r:.80}, which is wrong: {error}"
        ) from None
