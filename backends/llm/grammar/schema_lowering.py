"""JSON schemas said in the words that llguidance knows: one flat document of schemas that name each other.

What the result allows is valid by the schema; not all that is valid is allowed. Objects have their properties in the
order of the schema, and others only if `additionalProperties` says so; lists with `prefixItems` have all of these;
lists with `contains` have the matches among their first entries. InvalidArgumentError names a keyword that is not
supported, and where it stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from modelserver.backend import InvalidArgumentError

from .pace import Pace
from .patterns import library_pattern
from .schema_conditions import has_conditions
from .schema_flattening import ALTERNATIVES, FlatSchemas
from .schema_flattening import MAX_DEPTH as _MAX_DEPTH
from .schema_lists import list_schemas
from .schema_strings import name_pattern, string_schema
from .schema_terms import (
    APPLICATORS,
    CONDITIONS,
    CONSTRAINTS,
    TYPE_OF_KEYWORD,
    Excluded,
    Schema,
    checked,
    closed,
    count,
    pointer_step,
    types_of,
    with_enum,
    wrong,
)

_MAX_RULES = 10_000
# Schemas with these words stand by themselves, so that a document never nests deeply.
_COMPOUND = (
    APPLICATORS
    | CONDITIONS
    | {"properties", "items", "prefixItems", "additionalProperties", "patternProperties", "not", "contains"}
)
_NUMBER_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class LoweredSchema:
    """`root`, and the schemas that are named in it as `#/$defs/name`; `paths` says where each stood."""

    def __init__(self) -> None:
        self.root: Any = True
        self.rules: dict[str, Any] = {}
        self.paths: dict[str, str] = {}

    def document(self) -> dict[str, Any]:
        root = self.root if isinstance(self.root, Mapping) else {} if self.root else {"enum": []}
        return {**root, "$defs": self.rules}

    def without(self, names: set[str]) -> LoweredSchema:
        """The same where nothing can be as these rules say."""
        found = LoweredSchema()
        found.root = _without(self.root, names)
        found.rules = {name: _without(rule, names) for name, rule in self.rules.items() if name not in names}
        found.paths = self.paths
        return found


def _without(schema: Any, names: set[str]) -> Any:
    if isinstance(schema, list):
        return [_without(each, names) for each in schema]
    if not isinstance(schema, Mapping) or "enum" in schema:
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.removeprefix("#/$defs/") in names:
        return False
    return {
        key: {name: _without(each, names) for name, each in value.items()}
        if key in ("properties", "patternProperties")
        else _without(value, names)
        for key, value in schema.items()
    }


def lowered(schema: Any, pace: Pace) -> LoweredSchema:
    """A schema of a request for llguidance."""
    return _Lowering(schema, pace).lower()


class _Lowering:
    """Of one document, whose `$ref`s lead to places in itself. Schemas inside objects and lists become rules of their
    own, which are made one after the other, so that documents may be as deep as they like."""

    def __init__(self, document: Any, pace: Pace) -> None:
        self._document = document
        self._pace = pace
        self._lowered = LoweredSchema()
        self._waiting: deque[tuple[str, Any, str]] = deque()
        # Names of rules by what they are made of: a place of the document, or (merged) schemas, which have none.
        self._names: dict[str, str] = {}
        self._terms = FlatSchemas(self._target, pace.look)
        self._anchors: dict[str, list[Any]] | None = None

    def lower(self) -> LoweredSchema:
        self._lowered.root = self._schema(self._document, "#")
        while self._waiting:
            name, schema, path = self._waiting.popleft()
            self._lowered.rules[name] = self._schema(schema, path)
        return self._lowered

    def inner(self, schema: Any, path: str) -> Any:
        """A schema inside another: in place if it is small, else by a rule of its own."""
        is_small = not isinstance(schema, Mapping) or (
            schema.keys().isdisjoint(_COMPOUND) and types_of(schema) != ("object",)
        )
        if is_small:
            return self._schema(schema, path)
        return self._rule(path if self._is_at(schema, path) else None, schema, path)

    def _schema(self, schema: Any, path: str, depth: int = 0) -> Any:
        """The same in llguidance's words."""
        self._pace.look()
        if isinstance(schema, bool):
            return schema
        if depth > _MAX_DEPTH:
            raise wrong(path, f"schemas refer to each other more than {_MAX_DEPTH} deep, or in a circle")
        rest = {key: value for key, value in checked(schema, path).items() if key in CONSTRAINTS}
        if rest.keys() == {"$ref"}:
            return self._referred(rest["$ref"], path)
        if "$ref" in rest or "allOf" in rest or has_conditions(rest):
            return self._schema(self._flat(rest, path), path, depth + 1)
        for keyword in ALTERNATIVES:
            if keyword in rest:
                return self._alternatives(rest, keyword, path, depth)
        if "enum" in rest or "const" in rest:
            return self._listed(rest, path)
        whole = closed(rest, path)
        return _any_of([each for kind in types_of(whole) for each in self._of_type(kind, whole, path)])

    def _of_type(self, kind: str, schema: Schema, path: str) -> list[Any]:
        if kind == "object":
            return [self._object(schema, path)]
        if kind == "array":
            return list_schemas(self.inner, schema, path)
        if kind == "string":
            return [string_schema(schema, path)]
        if kind in ("number", "integer"):
            return [_number(kind, schema, path)]
        return [{"type": kind}]

    def _listed(self, schema: Schema, path: str) -> Any:
        """`enum` and `const`; llguidance sees to what else is said of their values."""
        values = with_enum(schema)["enum"]
        excluded = schema.get("not")
        if isinstance(excluded, Excluded):
            values = [value for value in values if value not in excluded.values]
        beside = {key: value for key, value in schema.items() if key not in ("enum", "const", "not")}
        if not beside or not values:
            return {"enum": values} if values else False
        if beside.keys() == {"type"}:
            return {"enum": values, **beside}
        return {"allOf": [{"enum": values}, self._schema(_of_any_type(beside), path)]}

    def _alternatives(self, schema: Schema, keyword: str, path: str, depth: int) -> Any:
        options = self._terms.options(schema, keyword, path)
        return _any_of(
            [self._schema(option, f"{path}/{keyword}/{place}", depth + 1) for place, option in enumerate(options)]
        )

    def _object(self, schema: Schema, path: str) -> Any:
        """An object: properties in order, then others where they are allowed."""
        given, required, patterns = (schema.get(word, {}) for word in ("properties", "required", "patternProperties"))
        least = count(schema, "minProperties", path) or 0
        additional = schema.get("additionalProperties", not (given or patterns))
        properties = {
            name: self.inner(value, f"{path}/properties/{pointer_step(name)}") for name, value in given.items()
        }
        beside = self.inner(additional, f"{path}/additionalProperties")
        unnamed = beside if "additionalProperties" in schema else True
        others = {name: unnamed for name in required if name not in properties}
        if least > max(1, len(required)):
            raise wrong(
                path, "minProperties above 1 and the number of required properties is not supported: keys could repeat"
            )
        if any(properties.get(name, others.get(name)) is False for name in required):
            return False
        found: dict[str, Any] = {"type": "object"}
        if properties or others:
            found["properties"] = {**properties, **others}
        if patterns:
            found["patternProperties"] = {
                library_pattern(pattern): self.inner(value, f"{path}/patternProperties/{pointer_step(pattern)}")
                for pattern, value in patterns.items()
            }
        return _with_names(found, schema, beside, path) | {
            word: schema[word] for word in ("required", "minProperties", "maxProperties") if word in schema
        }

    def _flat(self, schema: Any, path: str) -> Any:
        """A schema without `$ref`, `allOf` and conditions of its own."""
        return self._terms.flat(schema, path)

    def _referred(self, reference: Any, path: str) -> Any:
        """Resolve a lone `$ref`, also through others."""
        seen: list[Any] = []
        while True:
            if reference in seen:
                raise wrong(path, f"$ref {reference!r} refers to itself in a circle")
            seen.append(reference)
            target = self._target(reference, path)
            if not isinstance(target, Mapping) or target.keys() & CONSTRAINTS != {"$ref"}:
                return self._rule(reference, target, reference)
            reference = target["$ref"]

    def _target(self, reference: Any, path: str) -> Any:
        """Resolve a `$ref`: a JSON pointer into this document, or the name of a place."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise wrong(
                path, f"$ref {reference!r} is not supported; only places in the same schema are, as '#/$defs/a'"
            )
        if reference != "#" and not reference.startswith("#/"):
            if self._anchors is None:
                self._anchors = _anchors(self._document)
            places = self._anchors.get(unquote(reference[1:]), [])
            if len(places) != 1:
                what = "leads nowhere" if not places else "leads to several places, which have the same name"
                raise wrong(path, f"$ref {reference!r} {what}")
            return places[0]
        found = self._document
        for step in reference.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise wrong(path, f"$ref {reference!r} leads nowhere")
        return found

    def _is_at(self, schema: Any, path: str) -> bool:
        """Whether a schema is the document's own at this place, and not a merged one: then a `$ref` shares its rule."""
        try:
            return self._target(path, path) is schema
        except InvalidArgumentError:
            return False

    def _rule(self, place: str | None, schema: Any, path: str) -> Any:
        """A reference to the rule for a schema, which is made later; those of a place of the document share one."""
        name = self._names.get(place) if place is not None else None
        if name is None:
            if len(self._lowered.paths) >= _MAX_RULES:
                raise wrong(path, f"the schema needs more than {_MAX_RULES} rules")
            name = f"r{len(self._lowered.paths)}"
            self._lowered.paths[name] = path
            if place is not None:
                self._names[place] = name
            self._waiting.append((name, schema, path))
        return {"$ref": f"#/$defs/{name}"}


def _anchors(document: Any) -> dict[str, list[Any]]:
    """The schemas of a document that `$anchor` and `$dynamicAnchor` name."""
    found: dict[str, list[Any]] = {}
    waiting = [document]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, Mapping):
            named = [each.get("$anchor"), each.get("$dynamicAnchor")]
            for name in {name for name in named if isinstance(name, str)}:  # else it is a property's
                found.setdefault(name, []).append(each)
            waiting += [value for key, value in each.items() if key not in ("enum", "const", "default", "examples")]
    return found


def _of_any_type(schema: Schema) -> Schema:
    """A schema that says only what it says of values of each type, and takes all of the types that it says nothing of:
    what stands beside listed values forbids none for the lack of a type."""
    if "type" in schema:
        return schema
    concerned = {TYPE_OF_KEYWORD[word] for word in schema if word in TYPE_OF_KEYWORD}
    others = [kind for kind in ("object", "array", "string", "number", "boolean", "null") if kind not in concerned]
    return {**schema, "type": [*concerned, *others]}


def _any_of(options: list[Any]) -> Any:
    kept = [option for option in options if option is not False]
    if not kept:
        return False
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


def _number(kind: str, schema: Schema, path: str) -> Any:
    factor = schema.get("multipleOf")
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0):
        raise wrong(path, f"multipleOf must be a number above 0, it is {factor!r}")
    return {"type": kind, **{word: schema[word] for word in _NUMBER_WORDS if word in schema}}


def _with_names(found: dict[str, Any], schema: Schema, additional: Any, path: str) -> dict[str, Any]:
    """An object with its `additionalProperties`, and what `propertyNames` says of their names as a pattern."""
    names = schema.get("propertyNames", True)
    if names is True or names == {}:
        return {**found, "additionalProperties": additional}
    if found.keys() != {"type"} or not isinstance(names, Mapping):
        raise wrong(path, "propertyNames beside properties, or of another type than an object, is not supported")
    unknown = names.keys() & CONSTRAINTS - {"type", "enum", "const", "minLength", "maxLength", "pattern", "format"}
    if unknown:
        raise wrong(f"{path}/propertyNames", f"keyword {min(unknown)!r} is not supported here")
    pattern = name_pattern(checked(names, f"{path}/propertyNames"), f"{path}/propertyNames")
    return {**found, "patternProperties": {pattern: additional}, "additionalProperties": False}
