"""Limits of a caller: quotas, and a weight among waiting callers. Set by API key, or by a flag for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from modelserver.core.numerals import parse_float
from modelserver.core.spelling import nearest_hint
from modelserver.errors import InvalidArgumentError

_MAX = 1e12


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """A quota of 0 means unlimited. A second's worth may be spent at once, and always at least one request.

    `tokens_per_second` counts the tokens that language models read and write. They are known only afterwards, so a
    caller may overdraw and then waits longer. `concurrent` counts requests that are queued or executing. `weight` is
    the caller's share of a model, relative to the other callers that wait for it.
    """

    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    concurrent: int = 0
    weight: float = 1.0

    @property
    def is_metered(self) -> bool:
        """Whether there is any quota."""
        return bool(self.requests_per_second or self.tokens_per_second or self.concurrent)

    @property
    def fields(self) -> dict[str, float]:
        """The limits that are set, as a file has them."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if getattr(self, entry.name) != entry.default
        }


NO_LIMITS = CallerLimits()
_NAMES = tuple(entry.name for entry in fields(CallerLimits))


def parse_limits(where: str, values: Mapping[Any, Any]) -> CallerLimits:
    """Limits by their names. Raises InvalidArgumentError, beginning with `where`."""
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name not in _NAMES:
            raise InvalidArgumentError(
                f"{where}: unknown limit '{name!s:.40}', expected some of {', '.join(_NAMES)}"
                f"{nearest_hint(str(name), _NAMES)}"
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not is_number or not 0 <= value <= _MAX or (name == "weight" and value < 0.001):
            least = "0.001 or more" if name == "weight" else "0 or more"
            raise InvalidArgumentError(f"{where}: '{name}' must be a number, {least}, got '{value!s:.40}'")
        if name == "concurrent" and int(value) != value:
            raise InvalidArgumentError(f"{where}: 'concurrent' must be a whole number, got '{value!s:.40}'")
        checked[name] = int(value) if name == "concurrent" else float(value)
    return CallerLimits(**checked)


def parse_limits_flag(flag: str, text: str) -> CallerLimits:
    """Limits as `name=number[,name=number...]`. Raises InvalidArgumentError."""
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        if name.strip() in values:
            raise InvalidArgumentError(f"{flag}: '{name.strip():.40}' is there twice; keep one of them")
        try:
            values[name.strip()] = parse_float(number)
        except ValueError:
            raise InvalidArgumentError(f"{flag} expects NAME=NUMBER[,NAME=NUMBER...], got '{part:.60}'") from None
    return parse_limits(flag, values)
