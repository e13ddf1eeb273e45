"""JSON schemas as rules. What the rules allow is valid by the schema; not all that is valid is allowed.

Objects have their properties in the order of the schema, and others only if `additionalProperties` says so; keys of
others need no escapes; lists with `prefixItems` have all of these; numbers are of a size that programs can hold.
InvalidArgumentError names a keyword that is not supported, and where it stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from modelserver.backend import InvalidArgumentError

from .expression import NEVER, Expression, Ref, choice, literal, one_of
from .json_text import ANY_INTEGER, ANY_NUMBER, OBJECT, VALUE, json_literal, json_rules
from .multiples import multiples
from .number_ranges import integers, numbers
from .pace import Pace
from .program import ROOT
from .schema_conditions import has_conditions
from .schema_containers import array_expression, object_expression
from .schema_flattening import ALTERNATIVES, FlatSchemas, listed_schemas
from .schema_flattening import MAX_DEPTH as _MAX_DEPTH
from .schema_strings import string_expression
from .schema_terms import APPLICATORS, CONDITIONS, CONSTRAINTS, Schema, checked, types_of, wrong
from .schema_values import is_valid

_MAX_RULES = 10_000


def schema_rules(schema: Any, pace: Pace | None = None) -> dict[str, Expression]:
    """The rules of a schema; one is `root`."""
    return SchemaCompiler(schema, pace).compile()


def any_object_rules() -> dict[str, Expression]:
    return {ROOT: OBJECT, **json_rules()}


class SchemaCompiler:
    """Of one document, whose `$ref`s lead to places in itself. Schemas inside objects and lists become rules of their
    own, which are made one after the other, so that documents may be as deep as they like."""

    def __init__(self, document: Any, pace: Pace | None = None) -> None:
        self._document = document
        self._pace = pace
        self._rules: dict[str, Expression] = {}
        self._waiting: deque[tuple[str, Any, str]] = deque()
        self._names: set[str] = set()
        self._num_names = 0
        self._terms = FlatSchemas(self._target, self.look)

    def compile(self) -> dict[str, Expression]:
        self._rules = json_rules()
        self._rules[ROOT] = self.expression(self._document, "#")
        while self._waiting:
            name, schema, path = self._waiting.popleft()
            self._rules[name] = self.expression(schema, path)
        return self._rules

    def inner(self, schema: Any, path: str) -> Expression:
        """A schema inside another: in place if it is small, else by a rule of its own."""
        if isinstance(schema, Mapping) and not schema.keys() & _COMPOUND and types_of(schema) != ("object",):
            return self.expression(schema, path)
        if not isinstance(schema, Mapping):
            return self.expression(schema, path)
        return self._rule(path if self._is_at(schema, path) else self._new_name(path), schema, path)

    def share(self, path: str, expression: Expression) -> Expression:
        """A rule for what is used more than once."""
        name = self._new_name(path)
        self._rules[name] = expression
        return Ref(name)

    def expression(self, schema: Any, path: str, depth: int = 0) -> Expression:
        """What matches a schema."""
        self.look()
        if isinstance(schema, bool):
            return VALUE if schema else NEVER
        if depth > _MAX_DEPTH:
            raise wrong(path, f"schemas refer to each other more than {_MAX_DEPTH} deep, or in a circle")
        rest = {key: value for key, value in checked(schema, path).items() if key in CONSTRAINTS}
        if "$ref" in rest and len(rest) == 1:
            return self._rule(str(schema["$ref"]), self._target(schema["$ref"], path), str(schema["$ref"]))
        if "$ref" in rest or "allOf" in rest or has_conditions(rest):
            return self.expression(self.flat(rest, path), path, depth + 1)
        for keyword in ALTERNATIVES:
            if keyword in rest:
                return self._alternatives(rest, keyword, path, depth)
        if "enum" in rest or "const" in rest:
            return self._listed(rest, path)
        return choice(self._of_type(kind, rest, path) for kind in types_of(rest))

    def look(self) -> None:
        """InvalidArgumentError when compiling has taken too long."""
        if self._pace is not None:
            self._pace.look()

    def _of_type(self, kind: str, schema: Schema, path: str) -> Expression:
        if kind == "object":
            return object_expression(self, schema, path)
        if kind == "array":
            return array_expression(self, schema, path)
        if kind == "string":
            return string_expression(schema, path, self._new_name(path), self._rules.__setitem__, self._pace)
        if kind in ("number", "integer"):
            return self._number(kind, schema, path)
        return literal("null") if kind == "null" else choice([literal("true"), literal("false")])

    def _number(self, kind: str, schema: Schema, path: str) -> Expression:
        factor = _factor(schema, path)
        if factor is None:
            return _number(kind, schema)
        low, high = _whole_bounds(schema)
        found = multiples(factor, low, high, self._rules.__setitem__)
        if found is None:
            raise wrong(
                path,
                f"multipleOf {factor} is not supported with these bounds: they must leave at most 1000 multiples, "
                "or be 0, and without bounds it may be 100",
            )
        return found

    def _listed(self, schema: Schema, path: str) -> Expression:
        """`enum` and `const`."""
        values = schema.get("enum", [schema.get("const")])
        # They are in the list that they come from: to look each up in it would take the square of its length.
        rest = {key: value for key, value in schema.items() if key != "enum"}
        kept = []
        for value in values:
            self.look()
            if is_valid(value, rest, path, lambda inner: self.flat(inner, path)):
                kept.append(value)
        return one_of(json_literal(value, path).text for value in kept)

    def _alternatives(self, schema: Schema, keyword: str, path: str, depth: int) -> Expression:
        rest = {key: value for key, value in schema.items() if key != keyword}
        options = listed_schemas(schema, keyword, path)
        whole = [self._terms.joined(rest, option, path) for option in options] if rest else options
        if keyword == "oneOf":
            whole = self._terms.exclusive(whole, path)
        return choice(
            self.expression(option, f"{path}/{keyword}/{place}", depth + 1) for place, option in enumerate(whole)
        )

    def flat(self, schema: Any, path: str) -> Any:
        """A schema without `$ref`, `allOf` and conditions of its own."""
        return self._terms.flat(schema, path)

    def _target(self, reference: Any, path: str) -> Any:
        """What a `$ref` leads to: a JSON pointer into this document."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise wrong(
                path, f"$ref {reference!r} is not supported; only places in the same schema are, as '#/$defs/a'"
            )
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

    def _new_name(self, path: str) -> str:
        self._num_names += 1
        return f"{path} ({self._num_names})"

    def _rule(self, name: str, schema: Any, path: str) -> Ref:
        if name not in self._names:
            if len(self._names) >= _MAX_RULES:
                raise wrong(path, f"the schema needs more than {_MAX_RULES} rules")
            self._names.add(name)
            self._waiting.append((name, schema, path))
        return Ref(name)


_COMPOUND = (
    APPLICATORS
    | CONDITIONS
    | {"properties", "items", "prefixItems", "additionalProperties", "patternProperties", "not", "contains"}
)


def _factor(schema: Schema, path: str) -> int | None:
    """What numbers must be multiples of; None if that says nothing."""
    given = schema.get("multipleOf")
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
        raise wrong(path, f"multipleOf must be a number above 0, it is {given!r}")
    if given != int(given):
        raise wrong(path, f"multipleOf {given!r} is not supported: only whole numbers are")
    is_whole = types_of(schema) == ("integer",)
    return None if given == 1 and is_whole else int(given)


def _number(kind: str, schema: Schema) -> Expression:
    low, high, is_low_open, is_high_open = _bounds(schema)
    if low is None and high is None:
        return ANY_INTEGER if kind == "integer" else ANY_NUMBER
    if kind == "integer":
        return integers(*_whole_bounds(schema))
    return numbers(low, high, is_low_open=is_low_open, is_high_open=is_high_open)


def _whole_bounds(schema: Schema) -> tuple[int | None, int | None]:
    """The least and the largest integer."""
    low, high, is_low_open, is_high_open = _bounds(schema)
    least = None if low is None else _ceil(low) + (is_low_open and low == _ceil(low))
    most = None if high is None else -_ceil(-high) - (is_high_open and high == _ceil(high))
    return least, most


def _bounds(schema: Schema) -> tuple[Decimal | None, Decimal | None, bool, bool]:
    """The lower and the upper bound, and whether each is open."""
    bounds: dict[str, Decimal | None] = {}
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        value = schema.get(keyword)
        bounds[keyword] = None if value is None else Decimal(str(value))
    low, is_low_open = bounds["minimum"], False
    if (above := bounds["exclusiveMinimum"]) is not None and (low is None or above >= low):
        low, is_low_open = above, True
    high, is_high_open = bounds["maximum"], False
    if (below := bounds["exclusiveMaximum"]) is not None and (high is None or below <= high):
        high, is_high_open = below, True
    return low, high, is_low_open, is_high_open


def _ceil(value: Decimal) -> int:
    return int(value.to_integral_value(rounding="ROUND_CEILING"))
