"""Whether two schemas may match the same value: `oneOf` means exactly one, which a grammar cannot count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .schema_terms import Schema, has_type, in_both, types_of

# Properties inside of properties that are looked into.
_MAX_DEPTH = 8

Flatten = Callable[[Any], Any]


def may_overlap(first: Any, second: Any, flatten: Flatten, depth: int = 0) -> bool:
    """False only if no value can match both; `flatten` resolves `$ref` and `allOf`."""
    one, other = flatten(first), flatten(second)
    if one is False or other is False:
        return False
    if one is True or other is True or depth > _MAX_DEPTH:
        return True
    for schema, beside in ((one, other), (other, one)):
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return any(may_overlap(option, beside, flatten, depth + 1) for option in schema[keyword])
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None:
        return bool(in_both(values, other_values))
    if values is not None or other_values is not None:
        beside = other if values is not None else one
        return any(has_type(value, _types(beside)) for value in values or other_values or ())
    common = _with_numbers(_types(one)) & _with_numbers(_types(other))
    if common - {"object"}:
        return True
    return bool(common) and _may_objects_overlap(one, other, flatten, depth)


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: Schema) -> tuple[str, ...]:
    """Of values that match: without `type` they may be of any."""
    return types_of({"type": schema["type"]} if "type" in schema else {})


def _with_numbers(types: tuple[str, ...]) -> set[str]:
    return {"number" if kind == "integer" else kind for kind in types}


def _may_objects_overlap(one: Schema, other: Schema, flatten: Flatten, depth: int) -> bool:
    properties, other_properties = _properties(one), _properties(other)
    required, other_required = set(one.get("required", ())), set(other.get("required", ()))
    for name in required & other_required & properties.keys() & other_properties.keys():
        if not may_overlap(properties[name], other_properties[name], flatten, depth + 1):
            return False
    is_closed = one.get("additionalProperties") is False and not one.get("patternProperties")
    is_other_closed = other.get("additionalProperties") is False and not other.get("patternProperties")
    return not (is_closed and other_required - properties.keys()) and not (
        is_other_closed and required - other_properties.keys()
    )


def _properties(schema: Schema) -> Mapping[str, Any]:
    properties = schema.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}
