"""The vocabulary of JSON Schema as we take it: keywords obeyed, refused, or without effect; and merging schemas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelserver.backend import InvalidArgumentError

Schema = Mapping[str, Any]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

# Keywords that say of which type a value is that they concern.
TYPE_OF_KEYWORD = {
    "properties": "object", "required": "object", "additionalProperties": "object", "minProperties": "object",
    "maxProperties": "object", "patternProperties": "object", "propertyNames": "object",
    "items": "array", "prefixItems": "array", "additionalItems": "array", "minItems": "array", "maxItems": "array",
    "uniqueItems": "array",
    "minLength": "string", "maxLength": "string", "pattern": "string", "format": "string",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number",
    "multipleOf": "number",
}  # fmt: skip
APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
CONSTRAINTS = frozenset(TYPE_OF_KEYWORD) | APPLICATORS | {"type", "enum", "const"}
# What says something about a value that our automata cannot say, or that only a whole value tells.
REFUSED = frozenset(
    {
        "$anchor", "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas",
        "else", "if", "maxContains", "minContains", "not", "then", "unevaluatedItems",
        "unevaluatedProperties",
    }
)  # fmt: skip
# The same as not being there.
_VACUOUS: tuple[tuple[str, Any], ...] = (("uniqueItems", False),)


def wrong(path: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"structured output: JSON schema at {path}: {what}")


def pointer_step(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def checked(schema: Any, path: str) -> Schema:
    """A schema whose keywords we know; words that JSON Schema does not define have no effect, as it demands."""
    if not isinstance(schema, Mapping):
        raise wrong(path, f"a schema is an object, true or false, not {schema!r}")
    for keyword in schema:
        if keyword in REFUSED:
            raise wrong(path, f"keyword {keyword!r} is not supported")
    types = schema.get("type")
    for one in types if isinstance(types, list) else [] if types is None else [types]:
        if one not in TYPES:
            raise wrong(path, f"type {one!r} is none of {', '.join(TYPES)}")
    return {key: value for key, value in schema.items() if (key, value) not in _VACUOUS}


def count(schema: Schema, keyword: str, path: str) -> int | None:
    """A keyword that counts; None if it is not there."""
    value = schema.get(keyword)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise wrong(path, f"{keyword} must be a number from 0, it is {value!r}")
    return int(value)


def types_of(schema: Schema) -> tuple[str, ...]:
    """The types that values may have. Without `type` those whose keywords are there; of others we make none."""
    given = schema.get("type")
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list):
        return tuple(dict.fromkeys(given))
    return tuple(dict.fromkeys(TYPE_OF_KEYWORD[keyword] for keyword in schema if keyword in TYPE_OF_KEYWORD)) or TYPES


def is_equal(first: Any, second: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, and is not true."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(is_equal(*pair) for pair in zip(first, second, strict=True))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(is_equal(value, second[key]) for key, value in first.items())
    return bool(first == second)


def has_type(value: Any, types: tuple[str, ...]) -> bool:
    if value is None:
        return "null" in types
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and value == int(value))
    kind = "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    return kind in types


def merge(first: Any, second: Any, path: str) -> Any:
    """One schema for both; their `$ref`s are resolved already. InvalidArgumentError if we cannot say it in one."""
    if first is False or second is False:
        return False
    if first is True or second is True:
        return second if first is True else first
    one, other = checked(first, path), checked(second, path)
    _check_additional(one, other, path)
    merged = {**one, **other}
    for keyword in one.keys() & other.keys() & (CONSTRAINTS | {"$defs"}):
        if one[keyword] != other[keyword]:
            combine = _COMBINE.get(keyword)
            if combine is None:
                raise wrong(path, f"allOf (or a $ref with siblings) with two different {keyword!r} is not supported")
            merged[keyword] = combine(one[keyword], other[keyword])
    return False if merged.get("type") == [] or merged.get("enum") == [] else merged


def _check_additional(one: Schema, other: Schema, path: str) -> None:
    """`additionalProperties` sees the properties beside it only."""
    for closed, beside in ((one, other), (other, one)):
        is_open = closed.get("additionalProperties", True) is True
        if not is_open and beside.get("properties", {}).keys() - closed.get("properties", {}).keys():
            raise wrong(
                path,
                "allOf (or a $ref with siblings) with additionalProperties in one part and properties in another "
                "is not supported",
            )


def _both(first: Any, second: Any) -> Any:
    return {"allOf": [first, second]}


def _common_types(first: Any, second: Any) -> list[str]:
    one, other = ([types] if isinstance(types, str) else types for types in (first, second))
    common = [kind for kind in one if kind in other]
    if ("number" in one and "integer" in other) or ("number" in other and "integer" in one):
        common.append("integer")
    return list(dict.fromkeys(common))


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "type": _common_types,
    "properties": lambda one, other: {
        **one, **{name: _both(one[name], schema) if name in one else schema for name, schema in other.items()}
    },
    "required": lambda one, other: list(dict.fromkeys([*one, *other])),
    "enum": lambda one, other: [value for value in one if any(is_equal(value, same) for same in other)],
    "items": _both,
    "additionalProperties": _both,
    "minimum": max, "exclusiveMinimum": max, "minLength": max, "minItems": max, "minProperties": max,
    "maximum": min, "exclusiveMaximum": min, "maxLength": min, "maxItems": min, "maxProperties": min,
    "allOf": lambda one, other: [*one, *other],
    "$defs": lambda one, other: {**one, **other},
}  # fmt: skip
