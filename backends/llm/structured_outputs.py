"""A request's structured output in one form; vLLM has had three. Compiled by `grammar/`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from modelserver.backend import InvalidArgumentError

from .json_fields import boolean, decoded, string, strings, unknown, wrong

KINDS = ("json", "json_object", "regex", "choice", "grammar")
# Beside `json` and `json_object`, vLLM's name: no blanks between the elements of JSON.
COMPACT = "disable_any_whitespace"
# vLLM's options that mean nothing here; they may be false.
_NEUTRAL = ("disable_fallback", "disable_additional_properties")
# vLLM's names before `structured_outputs`.
ALIASES = frozenset({"guided_decoding", *(f"guided_{kind}" for kind in KINDS)})


@dataclass(frozen=True, slots=True)
class Asked:
    """One of KINDS, with its schema, expression, texts or grammar; `is_compact`: JSON has no blanks."""

    kind: str
    what: Any
    is_compact: bool = False

    @classmethod
    def of(cls, structured_outputs: Mapping[str, Any]) -> Asked:
        """InvalidArgumentError if it is none of KINDS, or more than one."""
        given = {kind: what for kind, what in structured_outputs.items() if what is not None}
        is_compact = bool(given.pop(COMPACT, False))
        if len(given) != 1 or not given.keys() <= set(KINDS):
            raise InvalidArgumentError(
                f"structured output: one of {', '.join(KINDS)} is expected, got {', '.join(given) or 'none'}"
            )
        ((kind, what),) = given.items()
        if kind == "json" and isinstance(what, str | bytes):
            what = orjson.loads(what)
        return cls(kind, what, is_compact)


def from_aliases(values: dict[str, Any]) -> Any:
    """Take the older names out of `values`; what they and `structured_outputs` say, None if nothing.

    Raises InvalidArgumentError if two of them are given.
    """
    found: list[tuple[str, Any]] = []
    for name in ("structured_outputs", *sorted(ALIASES)):
        value = values.pop(name, None)
        if value is not None:
            kind = name.removeprefix("guided_")
            found.append((name, {kind: value} if kind in KINDS else value))
    if len(found) > 1:
        raise wrong(found[1][0], f"absent when '{found[0][0]}' is given", found[1][1])
    return found[0][1] if found else None


def check_structured_outputs(name: str, value: Any) -> dict[str, Any]:
    """`{kind: what}` with one of KINDS, and COMPACT beside JSON; a schema that comes as text is parsed.

    Raises InvalidArgumentError.
    """
    if isinstance(value, str):
        value = decoded(name, value)
    if not isinstance(value, Mapping):
        raise wrong(name, f"an object with one of {', '.join(KINDS)}", value)
    given = {kind: what for kind, what in value.items() if what is not None}
    for option in _NEUTRAL:
        if option in given and boolean(f"{name}.{option}", given.pop(option)):
            raise wrong(f"{name}.{option}", "false or absent, because this server does not support it", True)
    is_compact = given.pop(COMPACT, None)
    options = {} if is_compact is None else {COMPACT: boolean(f"{name}.{COMPACT}", is_compact)}
    for kind in given:
        if kind not in KINDS:
            raise unknown(f"{name}.{kind}", [f"{name}.{known}" for known in KINDS])
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        raise wrong(name, f"an object with exactly one of {', '.join(KINDS)}", value)
    ((kind, what),) = given.items()
    return {kind: _checked(f"{name}.{kind}", kind, what)} | (options if kind in ("json", "json_object") else {})


def with_default(asked: Mapping[str, Any], *, is_compact: bool) -> Mapping[str, Any]:
    """The checked value, with the engine's choice of blanks if a request for JSON does not set it."""
    if not is_compact or COMPACT in asked or asked.keys().isdisjoint(("json", "json_object")):
        return asked
    return {**asked, COMPACT: True}


def _checked(name: str, kind: str, what: Any) -> Any:
    if kind == "json":
        schema = decoded(name, what) if isinstance(what, str) else what
        if not isinstance(schema, Mapping | bool):
            raise wrong(name, "a JSON schema, that is an object", what)
        return schema
    if kind == "json_object":
        return boolean(name, what)
    if kind == "choice":
        choices = strings(name, what)
        if not choices:
            raise wrong(name, "a list of at least one string", what)
        return list(choices)
    if not string(name, what):
        raise wrong(name, "a string that is not empty", what)
    return what
