"""The vocabulary of JSON Schema as we take it: keywords obeyed, refused, or without effect; and merging schemas."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from modelserver.backend import InvalidArgumentError

Schema = Mapping[str, Any]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")

# Keywords by the type of value that they concern.
TYPE_OF_KEYWORD = {
    "properties": "object", "required": "object", "additionalProperties": "object", "minProperties": "object",
    "maxProperties": "object", "patternProperties": "object", "propertyNames": "object",
    "unevaluatedProperties": "object", "unevaluatedItems": "array",
    "items": "array", "prefixItems": "array", "additionalItems": "array", "minItems": "array", "maxItems": "array",
    "uniqueItems": "array", "contains": "array", "minContains": "array", "maxContains": "array",
    "minLength": "string", "maxLength": "string", "pattern": "string", "format": "string",
    "minimum": "number", "maximum": "number", "exclusiveMinimum": "number", "exclusiveMaximum": "number",
    "multipleOf": "number",
}  # fmt: skip
APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
# Keywords that are rewritten in terms of the others (`schema_conditions`).
CONDITIONS = frozenset({"if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"})
CONSTRAINTS = frozenset(TYPE_OF_KEYWORD) | APPLICATORS | CONDITIONS | {"type", "enum", "const", "not"}
# What holds for properties and entries that no other part of a schema says anything of.
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
# In one document, in which a name stands once, these lead where a `$ref` does.
_REFERENCES = ("$dynamicRef", "$recursiveRef")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Of these null is the same as not being there; and so are some values of others.
_NULLABLE = frozenset({*_BOUNDS, *_COUNTS, "pattern", "format"})
_VACUOUS: tuple[tuple[str, Any], ...] = (("uniqueItems", False),)


@dataclass(frozen=True, slots=True)
class Excluded:
    """The `not` that is left when all others have been said positively: strings that are none of `values`. It stands
    in a schema beside the type string, and no request can send it."""

    values: tuple[str, ...] = ()

    def __or__(self, other: Excluded) -> Excluded:
        return Excluded(self.values + other.values)


def wrong(path: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"structured output: JSON schema at {path}: {what}")


def pointer_step(name: str) -> str:
    """A name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def checked(schema: Any, path: str) -> Schema:
    """A schema whose keywords we know; words that JSON Schema does not define have no effect, as it demands."""
    if not isinstance(schema, Mapping):
        raise wrong(path, f"a schema is an object, true or false, not {schema!r}")
    references = [keyword for keyword in ("$ref", *_REFERENCES) if keyword in schema]
    if len(references) > 1:
        raise wrong(path, f"{references[0]} beside {references[1]} is not supported")
    if references and references[0] != "$ref":
        schema = {"$ref" if key == references[0] else key: value for key, value in schema.items()}
    types = schema.get("type")
    for one in types if isinstance(types, list) else [] if types is None else [types]:
        if one not in TYPES:
            raise wrong(path, f"type {one!r} is none of {', '.join(TYPES)}")
    kept = {
        key: value
        for key, value in schema.items()
        if (key, value) not in _VACUOUS and not (value is None and key in _NULLABLE)
    }
    _check_shapes(kept, path)
    if "contains" in kept:
        kept.setdefault("minContains", 1)
        return kept
    return {key: value for key, value in kept.items() if key not in ("minContains", "maxContains")}


def closed(schema: Schema, path: str) -> Schema:
    """A schema without parts of its own: what it says of the unevaluated is said of all that it does not name."""
    found = {key: value for key, value in schema.items() if key not in UNEVALUATED}
    if "unevaluatedProperties" in schema:
        found.setdefault("additionalProperties", schema["unevaluatedProperties"])
    if "unevaluatedItems" in schema:
        if "contains" in found:
            raise wrong(path, "unevaluatedItems beside contains is not supported")
        name = "additionalItems" if isinstance(found.get("items"), list) else "items"
        found.setdefault(name, schema["unevaluatedItems"])
    return found


def _check_shapes(schema: Schema, path: str) -> None:
    """Whatever is read of schemas or merged without another look."""
    for keyword in ("properties", "patternProperties"):
        if keyword in schema and not isinstance(schema[keyword], Mapping):
            raise wrong(path, f"{keyword} must be an object, it is {schema[keyword]!r}")
    for keyword in ("anyOf", "oneOf", "allOf", "enum", "prefixItems"):
        if keyword in schema and not isinstance(schema[keyword], list):
            raise wrong(path, f"{keyword} must be a list, it is {schema[keyword]!r}")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise wrong(path, f"required must be a list of names, it is {required!r}")
    for keyword in _BOUNDS:
        bound = schema.get(keyword, 0)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            raise wrong(path, f"{keyword} must be a number, it is {bound!r}")
    for keyword in _COUNTS:
        count(schema, keyword, path)


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


def in_both(values: list[Any], others: list[Any]) -> list[Any]:
    """The values that are equal to one of the others, in time that grows with the lengths of both lists."""
    known = {identity(value) for value in others}
    return [value for value in values if identity(value) in known]


def identity(value: Any) -> Hashable:
    """The same for values that are equal by `is_equal`, and for no others."""
    if isinstance(value, bool):
        return bool, value
    if isinstance(value, list):
        return list, *map(identity, value)
    if isinstance(value, Mapping):
        return dict, frozenset((key, identity(each)) for key, each in value.items())
    return value  # type: ignore[no-any-return]  # a number, a string or null; 1 and 1.0 have one hash


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
    _check_parts(one, other, path)
    one, other = _with_additional(one, other), _with_additional(other, one)
    if _lists_values(one) and _lists_values(other):
        one, other = with_enum(one), with_enum(other)
    merged = {**one, **other}
    for keyword in one.keys() & other.keys() & (CONSTRAINTS | {"$defs"}):
        if one[keyword] != other[keyword]:
            combine = _COMBINE.get(keyword)
            if combine is None:
                raise wrong(path, f"allOf (or a $ref with siblings) with two different {keyword!r} is not supported")
            merged[keyword] = combine(one[keyword], other[keyword])
    return False if merged.get("type") == [] or merged.get("enum") == [] else merged


def _lists_values(schema: Schema) -> bool:
    return "const" in schema or isinstance(schema.get("enum"), list)


def with_enum(schema: Schema) -> Schema:
    """The same with `enum` in place of `const`."""
    if "const" not in schema:
        return schema
    const = schema["const"]
    values = [value for value in schema.get("enum", [const]) if is_equal(value, const)]
    return {**{key: value for key, value in schema.items() if key != "const"}, "enum": values}


def _check_parts(one: Schema, other: Schema, path: str) -> None:
    """What a keyword sees of those beside it cannot be said for several parts at once."""
    for closed, beside in ((one, other), (other, one)):
        first = closed.get("prefixItems", closed.get("items"))
        if isinstance(first, list) and beside.keys() & {"items", "prefixItems", "additionalItems"}:
            raise wrong(path, "allOf with first entries of a list in one part and entries in another is not supported")
        names = beside.keys() & {"properties", "patternProperties"}
        if closed.get("additionalProperties", True) is not True and (
            "patternProperties" in names or ("patternProperties" in closed and names)
        ):
            raise wrong(path, "allOf with additionalProperties and patternProperties in two parts is not supported")


def _with_additional(schema: Schema, beside: Schema) -> Schema:
    """`additionalProperties` of one part also holds for properties that only the other one names."""
    additional, known = beside.get("additionalProperties", True), beside.get("properties", {})
    if additional is True or "properties" not in schema:
        return schema
    properties = {
        name: value if name in known else _both(value, additional) for name, value in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def _both(first: Any, second: Any) -> Any:
    if first is False or second is False:
        return False
    is_joined = isinstance(first, Mapping) and first.keys() == {"allOf"} and isinstance(first["allOf"], list)
    return {"allOf": [*(first["allOf"] if is_joined else [first]), second]}


def _common_types(first: Any, second: Any) -> list[str]:
    one, other = ([types] if isinstance(types, str) else types for types in (first, second))
    common = [kind for kind in one if kind in other]
    if ("number" in one and "integer" in other) or ("number" in other and "integer" in one):
        common.append("integer")
    return list(dict.fromkeys(common))


def _several(first: Any, second: Any) -> tuple[Any, ...]:
    """All patterns, or formats; one that is malformed is kept, to be refused where it is read."""
    one, other = (given if isinstance(given, tuple) else (given,) for given in (first, second))
    return tuple(dict.fromkeys((*one, *other)))


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "type": _common_types,
    "properties": lambda one, other: {
        **one, **{name: _both(one[name], schema) if name in one else schema for name, schema in other.items()}
    },
    "required": lambda one, other: list(dict.fromkeys([*one, *other])),
    "enum": in_both,
    "items": _both,
    "additionalProperties": _both,
    "pattern": _several, "format": _several,
    "not": lambda one, other: one | other,
    "minContains": max, "maxContains": min,
    "minimum": max, "exclusiveMinimum": max, "minLength": max, "minItems": max, "minProperties": max,
    "maximum": min, "exclusiveMaximum": min, "maxLength": min, "maxItems": min, "maxProperties": min,
    "allOf": lambda one, other: [*one, *other],
    "$defs": lambda one, other: {**one, **other},
}  # fmt: skip
