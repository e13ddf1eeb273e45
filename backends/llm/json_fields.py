"""JSON values and strings (config.pbtxt, request parameters) as typed fields, with errors that name the field."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Collection
from typing import Any

from modelserver.backend import InvalidArgumentError, shortened

LONGEST_QUOTE = 80
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,1000}\s*")


def quote(value: Any) -> str:
    """A value as it is shown in an error: as JSON, cut where it is long."""
    try:
        text = json.dumps(shortened(value, 2 * LONGEST_QUOTE), ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_QUOTE else text[:LONGEST_QUOTE] + "..."


def wrong(name: str, expected: str, value: Any) -> InvalidArgumentError:
    return InvalidArgumentError(f"parameter '{name}' must be {expected}, got {quote(value)}")


def unknown(name: str, known: Collection[str]) -> InvalidArgumentError:
    """`name` is not a parameter; the nearest one is proposed, if one is near."""
    near = difflib.get_close_matches(name[:100], sorted(known), n=1, cutoff=0.6)
    hint = f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(sorted(known))}"
    return InvalidArgumentError(f"unknown parameter '{name[:100]}'{hint}")


def integer(name: str, value: Any) -> int:
    """An integer, or a string or float that is one."""
    if isinstance(value, str):
        # int() alone reads "1_0" and the digits of every script, and none of more than some thousand digits.
        if not _INTEGER.fullmatch(value):
            raise wrong(name, "an integer", value)
        return int(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != value
        or value in (math.inf, -math.inf)
    ):
        raise wrong(name, "an integer", value)
    if value != int(value):
        raise wrong(name, "an integer", value)
    return int(value)


def number(name: str, value: Any) -> float:
    """A finite number, or a string that is one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise wrong(name, "a number", value)
    try:
        converted = float(value)
    except (ValueError, OverflowError):
        raise wrong(name, "a number", value) from None
    if not math.isfinite(converted):
        raise wrong(name, "a finite number", value)
    return converted


def boolean(name: str, value: Any) -> bool:
    """A boolean, or "true", "false", "1", "0" in a string."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "1"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "0"):
        return False
    raise wrong(name, "true or false", value)


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, "a string", value)
    return value


def strings(name: str, value: Any) -> tuple[str, ...]:
    """A string, or a list of strings; none may be empty."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(item, str) for item in values):
        raise wrong(name, "a string or a list of strings", value)
    if not all(values):
        raise wrong(name, "without empty strings", value)
    return tuple(values)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of token ids; strings hold one as JSON."""
    values = decoded(name, value) if isinstance(value, str) else value
    if not isinstance(values, list | tuple):
        raise wrong(name, "a list of token ids", value)
    ids = tuple(integer(name, item) for item in values)
    if any(token_id < 0 for token_id in ids):
        raise wrong(name, "a list of token ids, which are not negative", value)
    return ids


def decoded(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"parameter '{name}' must be JSON, got {quote(text)}: {error}") from None
