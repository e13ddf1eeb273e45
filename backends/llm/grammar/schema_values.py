"""Whether a listed value (`enum`, `const`) satisfies the other keywords of its schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .schema_terms import Excluded, Schema, count, has_type, is_equal

# A schema without `$ref`, `allOf` and conditions of its own.
Flatten = Callable[[Any], Any]

_BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}


def may_be_valid(value: Any, schema: Any, path: str, flatten: Flatten) -> bool:
    """False only if it is not; of keywords that are not looked at, `pattern` and `contains` among them, the library
    that makes a grammar of the schema has the last word."""
    schema = flatten(schema)
    if isinstance(schema, bool):
        return schema
    if not _is_listed(value, schema, path, flatten):
        return False
    if isinstance(value, str):
        excluded = schema.get("not")
        is_excluded = isinstance(excluded, Excluded) and value in excluded.values
        return not is_excluded and _is_within(len(value), schema, "minLength", "maxLength", path)
    if isinstance(value, list):
        return _is_array_valid(value, schema, path, flatten)
    if isinstance(value, Mapping):
        return _is_object_valid(value, schema, path, flatten)
    if isinstance(value, bool) or value is None:
        return True
    return all(holds(value, schema[keyword]) for keyword, holds in _BOUNDS.items() if keyword in schema)


def _is_listed(value: Any, schema: Schema, path: str, flatten: Flatten) -> bool:
    types = schema.get("type")
    if types is not None and not has_type(value, (types,) if isinstance(types, str) else tuple(types)):
        return False
    if "const" in schema and not is_equal(value, schema["const"]):
        return False
    if "enum" in schema and not any(is_equal(value, each) for each in schema["enum"]):
        return False
    if "anyOf" in schema and not any(may_be_valid(value, each, path, flatten) for each in schema["anyOf"]):
        return False
    return "oneOf" not in schema or any(may_be_valid(value, each, path, flatten) for each in schema["oneOf"])


def _is_within(length: int, schema: Schema, low: str, high: str, path: str) -> bool:
    least, most = count(schema, low, path) or 0, count(schema, high, path)
    return least <= length and (most is None or length <= most)


def _is_array_valid(value: list[Any], schema: Schema, path: str, flatten: Flatten) -> bool:
    items = schema.get("items", True)
    if "prefixItems" in schema or isinstance(items, list):
        items = True
    return _is_within(len(value), schema, "minItems", "maxItems", path) and all(
        may_be_valid(each, items, path, flatten) for each in value
    )


def _is_object_valid(value: Mapping[str, Any], schema: Schema, path: str, flatten: Flatten) -> bool:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not _is_within(len(value), schema, "minProperties", "maxProperties", path):
        return False
    if not all(name in value for name in schema.get("required", ())):
        return False
    if "patternProperties" in schema:
        others = True
    return all(may_be_valid(each, properties.get(name, others), path, flatten) for name, each in value.items())
