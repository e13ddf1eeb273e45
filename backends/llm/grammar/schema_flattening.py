"""Schemas without `$ref`, `allOf` and conditions: several joined to one, alternatives that contradict it left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from modelserver.backend import InvalidArgumentError

from .schema_conditions import has_conditions, negated, without_conditions
from .schema_terms import (
    CONSTRAINTS,
    UNEVALUATED,
    Excluded,
    Schema,
    checked,
    closed,
    count,
    has_type,
    in_both,
    is_equal,
    merge,
    types_of,
    wrong,
)

ALTERNATIVES = ("anyOf", "oneOf")
# Schemas inside of each other without an object or a list between them.
MAX_DEPTH = 60
# Alternatives that alternatives of several parts come to together.
_MAX_ALTERNATIVES = 512


def listed_schemas(schema: Schema, keyword: str, path: str) -> list[Any]:
    """The value of a keyword that has a list of schemas."""
    options = schema[keyword]
    if not isinstance(options, list) or not options:
        raise wrong(path, f"{keyword} must be a list of at least one schema")
    return options


class FlatSchemas:
    """Flattens one document. `target` resolves a `$ref` at a place; `look` raises when time is over."""

    def __init__(self, target: Callable[[Any, str], Any], look: Callable[[], None]) -> None:
        self._target = target
        self._look = look
        # Conditions and negations that were said in other words.
        self._num_rewritten = 0

    def flat(self, schema: Any, path: str, depth: int = 0) -> Any:
        """A schema without `$ref`, `allOf` and conditions of its own."""
        while not isinstance(schema, bool):
            if depth > MAX_DEPTH:
                raise wrong(path, f"schemas refer to each other more than {MAX_DEPTH} deep, or in a circle")
            depth += 1
            schema = checked(schema, path)
            if _has_parts(schema) and not schema.keys().isdisjoint(UNEVALUATED):
                return self.beside_unevaluated(schema, path, partial(self.joined, True, path=path, depth=depth))
            if has_conditions(schema):
                self._num_rewritten += 1
                schema = without_conditions(schema, path, lambda reference: self._target(reference, path))
            elif "$ref" in schema:
                rest = {key: value for key, value in schema.items() if key != "$ref" and key in CONSTRAINTS}
                target = self._target(schema["$ref"], path)
                schema = self.joined(target, rest, path, depth) if rest else target
            elif "allOf" in schema:
                schema = self._merged(schema, path, depth)
            else:
                return schema
        return schema

    def _merged(self, schema: Schema, path: str, depth: int) -> Any:
        parts = schema["allOf"]
        if not isinstance(parts, list):
            raise wrong(path, "allOf must be a list of schemas")
        merged: Any = {key: value for key, value in schema.items() if key != "allOf"}
        for part in parts:
            merged = self.joined(merged, part, path, depth)
        return merged

    def beside_unevaluated(self, schema: Schema, path: str, make: Callable[[Schema], Any]) -> Any:
        """What `make` makes of the rest of a schema, beside what the schema says of the unevaluated.

        That sees whatever the rest names, but what it is not: negations, in other words, name properties, too.
        """
        words = {keyword: schema[keyword] for keyword in UNEVALUATED if keyword in schema}
        num_rewritten = self._num_rewritten
        made = make({keyword: value for keyword, value in schema.items() if keyword not in words})
        if words and self._num_rewritten != num_rewritten:
            raise wrong(
                path, f"{min(words)} beside not, if, dependent properties or oneOf that overlaps is not supported"
            )
        return _with(made, words)

    def _closed(self, schema: Any, path: str, depth: int) -> Any:
        """A flat schema that says nothing of what is unevaluated: so it can be joined to others, which that ignores."""
        if isinstance(schema, bool) or schema.keys().isdisjoint(UNEVALUATED):
            return schema
        if not _has_alternatives(schema):
            return closed(schema, path)
        ways = self._ways(schema, path, depth)
        return {"anyOf": ways} if ways else False

    def joined(self, first: Any, second: Any, path: str, depth: int = 0) -> Any:
        """A schema for both."""
        self._look()
        one, other = (self._closed(self.flat(each, path, depth + 1), path, depth + 1) for each in (first, second))
        if not (_has_alternatives(one) and _has_alternatives(other)):
            return merge(one, other, path)
        ways, other_ways = self._ways(one, path, depth), self._ways(other, path, depth)
        found: list[Any] = []
        for way in ways:
            for other_way in other_ways:
                self._look()
                both = self._settled(merge(way, other_way, path), path)
                if both is not False:
                    found.append(both)
            if len(found) > _MAX_ALTERNATIVES:
                raise wrong(path, f"alternatives (anyOf, oneOf, if) come to more than {_MAX_ALTERNATIVES} together")
        return {"anyOf": found} if found else False

    def _ways(self, schema: Any, path: str, depth: int) -> list[Any]:
        """Split a flat schema into several without alternatives, one of which must hold."""
        if not _has_alternatives(schema):
            settled = self._settled(self._closed(schema, path, depth), path)
            return [] if settled is False else [settled]
        keyword = next(each for each in ALTERNATIVES if each in schema)
        options = self.options(schema, keyword, path, depth + 1, is_apart_first=True)
        return [way for option in options for way in self._ways(option, path, depth + 1)]

    def options(
        self, schema: Schema, keyword: str, path: str, depth: int = 0, *, is_apart_first: bool = False
    ) -> list[Any]:
        """The alternatives of a keyword, each with all that is said beside it.

        `is_apart_first`: all are flat, and those of `oneOf` are told apart by themselves, not by what is beside them.
        """
        beside = {key: value for key, value in schema.items() if key != keyword}

        def make(rest: Schema) -> Any:
            found = listed_schemas(schema, keyword, path)
            if keyword == "oneOf" and is_apart_first:
                found = self.exclusive(found, path)
            if beside or is_apart_first:
                found = [self.joined(rest, option, path, depth) for option in found]
            if keyword == "oneOf" and not is_apart_first:
                found = self.exclusive(found, path)
            return {"anyOf": found}

        made = self.beside_unevaluated(beside, path, make)
        words = {key: made[key] for key in UNEVALUATED if key in made}
        return [_with(option, words) for option in made["anyOf"]]

    def _settled(self, schema: Any, path: str) -> Any:
        """A flat schema whose required properties are flat, too, where they were joined; False if they contradict."""
        if isinstance(schema, bool):
            return schema
        try:
            if "enum" in schema or "const" in schema:
                values = schema.get("enum", [schema.get("const")])
                is_possible = any(
                    may_be_valid(value, schema, path, lambda inner: self.flat(inner, path)) for value in values
                )
                return schema if is_possible else False
            return self._with_settled_properties(schema, path)
        except InvalidArgumentError:  # reported where it matters
            return schema

    def _with_settled_properties(self, schema: Schema, path: str) -> Any:
        properties = schema.get("properties", {})
        changed: dict[str, Any] = {}
        for name in schema.get("required", ()):
            value = properties.get(name, True)
            if isinstance(value, Mapping) and "allOf" in value:
                value = changed[name] = self._settled(self.flat(value, path), path)
            if value is False:
                return False
        return {**schema, "properties": {**properties, **changed}} if changed else schema

    def exclusive(self, options: list[Any], path: str) -> list[Any]:
        """Alternatives of which a value matches one at most: what matches the others too is taken from each."""
        flat = [self._closed(self.flat(option, path), path, 0) for option in options]
        clash = self._clash(flat, path)
        if clash is None:
            return options
        try:
            apart = [self._apart(options, place, path) for place in range(len(options))]
        except InvalidArgumentError:
            apart = []
        if all(option is False for option in apart):
            raise wrong(
                path,
                f"oneOf: alternatives {clash[0]} and {clash[1]} may match the same value, which no grammar rules "
                "out; use anyOf, or a property that is required in both with a const of its own in each",
            )
        return apart

    def _clash(self, flat: list[Any], path: str) -> tuple[int, int] | None:
        for place, first in enumerate(flat):
            for other in range(place + 1, len(flat)):
                self._look()
                if may_overlap(first, flat[other], lambda schema: self.flat(schema, path)):
                    return place, other
        return None

    def _apart(self, options: list[Any], place: int, path: str) -> Any:
        others = [option for other, option in enumerate(options) if other != place]
        apart = options[place]
        self._num_rewritten += 1
        for other in others:
            apart = self.joined(apart, negated(other, path, lambda reference: self._target(reference, path)), path)
        return apart


def _with(schema: Any, words: Schema) -> Any:
    return schema if schema is False or not words else {**({} if schema is True else schema), **words}


def _has_parts(schema: Schema) -> bool:
    return "$ref" in schema or "allOf" in schema or has_conditions(schema)


def _has_alternatives(schema: Any) -> bool:
    return isinstance(schema, Mapping) and any(keyword in schema for keyword in ALTERNATIVES)


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


# Properties inside of properties that are looked into.
_MAX_DEPTH = 8
# A schema without `$ref`, `allOf` and conditions of its own.
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
