"""`not`, `if`, and what depends on a property, said in terms of `allOf`, `anyOf` and keywords that grammars can obey.

A schema is negated by its parts (De Morgan). What comes out may allow less than it could, never more: under a negation
nothing is approximated, because what is negated is what the request said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .schema_terms import CONDITIONS, CONSTRAINTS, TYPES, Excluded, Schema, checked, count, has_type, wrong

# Resolves a `$ref`.
Resolve = Callable[[Any], Any]

_MAX_DEPTH = 60
_OPPOSITE_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
# Of pairs of counts: the lower and the upper one, and the type.
_COUNTS = (
    ("minLength", "maxLength", "string"),
    ("minItems", "maxItems", "array"),
    ("minProperties", "maxProperties", "object"),
)


def has_conditions(schema: Schema) -> bool:
    return not schema.keys().isdisjoint(CONDITIONS) or ("not" in schema and not isinstance(schema["not"], Excluded))


def without_conditions(schema: Schema, path: str, resolve: Resolve) -> Schema:
    """The same schema without conditions of its own; what they say is in its `allOf`."""
    parts: list[Any] = []
    rest = {keyword: value for keyword, value in schema.items() if keyword not in CONDITIONS}
    if not isinstance(rest.get("not"), Excluded | None):
        parts.append(negated(rest.pop("not"), path, resolve))
    if "if" in schema and not schema.keys().isdisjoint(("then", "else")):
        then, other = schema.get("then", True), schema.get("else", True)
        parts.append({"anyOf": [_all(schema["if"], then), _all(negated(schema["if"], path, resolve), other)]})
    for name, needed in _dependent(schema, path):
        absent = {"type": "object", "properties": {name: False}}
        present = {"type": "object", "required": [name]}
        others = [kind for kind in TYPES if kind != "object"]
        parts.append({"anyOf": [{"type": others}, absent, _all(present, needed)]})
    given = schema.get("allOf", [])
    if not isinstance(given, list):
        raise wrong(path, "allOf must be a list of schemas")
    return {**rest, "allOf": [*given, *parts]} if parts or given else rest


def _all(*schemas: Any) -> Any:
    kept = [schema for schema in schemas if schema is not True]
    return kept[0] if len(kept) == 1 else {"allOf": kept} if kept else True


def _dependent(schema: Schema, path: str) -> list[tuple[str, Any]]:
    """The further conditions that hold if a property is present."""
    found: list[tuple[str, Any]] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        given = schema.get(keyword, {})
        if not isinstance(given, Mapping):
            raise wrong(path, f"{keyword} must be an object, it is {given!r}")
        for name, needed in given.items():
            is_names = isinstance(needed, list) and all(isinstance(each, str) for each in needed)
            if isinstance(needed, list) != (keyword == "dependentRequired") and keyword != "dependencies":
                raise wrong(f"{path}/{keyword}", f"{name!r} is not what it should be: {needed!r}")
            if isinstance(needed, list) and not is_names:
                raise wrong(f"{path}/{keyword}", f"{name!r} must be a list of names, it is {needed!r}")
            found.append((name, {"type": "object", "required": needed} if is_names else needed))
    return found


def negated(schema: Any, path: str, resolve: Resolve, depth: int = 0) -> Any:
    """A schema of values that do not match `schema`. InvalidArgumentError names a keyword whose opposite has none."""
    if isinstance(schema, bool):
        return not schema
    if depth > _MAX_DEPTH:
        raise wrong(path, f"schemas refer to each other more than {_MAX_DEPTH} deep, or in a circle")
    schema = checked(schema, path)
    negation = _Negation(schema, f"{path}/not", resolve, depth)
    options = [option for keyword in schema if keyword in CONSTRAINTS for option in negation.options(keyword)]
    return options[0] if len(options) == 1 else {"anyOf": options} if options else False


class _Negation:
    """Of one schema: for each keyword the ways in which a value can miss it."""

    def __init__(self, schema: Schema, path: str, resolve: Resolve, depth: int) -> None:
        self._schema = schema
        self._path = path
        self._resolve = resolve
        self._depth = depth

    def options(self, keyword: str) -> list[Any]:
        value = self._schema[keyword]
        if keyword in _OPPOSITE_BOUNDS:
            return [{"type": "number", _OPPOSITE_BOUNDS[keyword]: value}]
        for low, high, kind in _COUNTS:
            if keyword in (low, high):
                return self._count(keyword, low, high, kind)
        named = getattr(self, f"_{keyword.removeprefix('$')}", None)
        if named is None:
            raise wrong(self._path, f"keyword {keyword!r} is not supported inside of not, if or oneOf")
        found: list[Any] = named(value)
        return found

    def _not_of(self, schema: Any) -> Any:
        return negated(schema, self._path, self._resolve, self._depth + 1)

    def _count(self, keyword: str, low: str, high: str, kind: str) -> list[Any]:
        bound = count(self._schema, keyword, self._path) or 0
        if keyword == high:
            return [{"type": kind, low: bound + 1}]
        return [{"type": kind, high: bound - 1}] if bound else []

    def _type(self, value: Any) -> list[Any]:
        given = [value] if isinstance(value, str) else value
        others = [kind for kind in TYPES if kind not in given]
        if "number" in given or "integer" in given:  # numbers that are no integers are left out
            others = [kind for kind in others if kind not in ("number", "integer")]
        return [{"type": others}] if others else []

    def _const(self, value: Any) -> list[Any]:
        return self._enum([value])

    def _enum(self, values: Any) -> list[Any]:
        if not isinstance(values, list):
            raise wrong(self._path, f"enum must be a list, it is {values!r}")
        kinds = [kind for kind in TYPES if not any(has_type(value, (kind,)) for value in values)]
        if "number" not in kinds:
            kinds = [kind for kind in kinds if kind != "integer"]
        options: list[Any] = [{"type": kinds}] if kinds else []
        texts = tuple(value for value in values if isinstance(value, str))
        if texts:
            options.append({"type": "string", "not": Excluded(texts)})
        options += [{"const": flag} for flag in (False, True) if self._is_other_flag(flag, values)]
        options += self._between(sorted({value for value in values if type(value) in (int, float)}))
        options += self._other_arrays([value for value in values if isinstance(value, list)])
        options += self._other_objects([value for value in values if isinstance(value, Mapping)])
        return options

    @staticmethod
    def _is_other_flag(flag: bool, values: list[Any]) -> bool:
        flags = [value for value in values if isinstance(value, bool)]
        return bool(flags) and flag not in flags

    @staticmethod
    def _between(numbers: list[float]) -> list[Any]:
        if not numbers:
            return []
        lows, highs = [None, *numbers], [*numbers, None]
        return [
            {
                "type": "number",
                **({} if low is None else {"exclusiveMinimum": low}),
                **({} if high is None else {"exclusiveMaximum": high}),
            }
            for low, high in zip(lows, highs, strict=True)
        ]

    @staticmethod
    def _other_arrays(values: list[list[Any]]) -> list[Any]:
        """Of another length."""
        if not values:
            return []
        lengths = [len(value) for value in values]
        longer = {"type": "array", "minItems": max(lengths) + 1}
        return [longer, {"type": "array", "maxItems": min(lengths) - 1}] if min(lengths) else [longer]

    def _other_objects(self, values: list[Mapping[str, Any]]) -> list[Any]:
        """Without a property that they have, or with another value there."""
        if not values:
            return []
        each = [
            {
                "anyOf": [
                    {"type": "object", "minProperties": 1} if not value else False,
                    *self._required(list(value)),
                    *self._properties({name: {"const": inner} for name, inner in value.items()}),
                ]
            }
            for value in values
        ]
        return [_all(*each)]

    def _properties(self, value: Any) -> list[Any]:
        if not isinstance(value, Mapping):
            raise wrong(self._path, f"properties must be an object, it is {value!r}")
        return [
            {"type": "object", "required": [name], "properties": {name: {"not": schema}}}
            for name, schema in value.items()
            if schema is not True and schema != {}
        ]

    def _required(self, value: Any) -> list[Any]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise wrong(self._path, f"required must be a list of names, it is {value!r}")
        return [{"type": "object", "properties": {name: False}} for name in value]

    def _items(self, value: Any) -> list[Any]:
        if isinstance(value, list) or "prefixItems" in self._schema:
            raise wrong(self._path, "lists by position are not supported inside of not, if or oneOf")
        return [{"type": "array", "contains": {"not": value}}]

    def _contains(self, value: Any) -> list[Any]:
        least = count(self._schema, "minContains", self._path)
        least = 1 if least is None else least
        most = count(self._schema, "maxContains", self._path)
        fewer = {"type": "array", "contains": value, "minContains": 0, "maxContains": least - 1}
        if least == 1:
            fewer = {"type": "array", "items": {"not": value}}
        more = [] if most is None else [{"type": "array", "contains": value, "minContains": most + 1}]
        return ([fewer] if least else []) + more

    def _minContains(self, _: Any) -> list[Any]:  # noqa: N802  # named by its keyword; `contains` sees to it
        return []

    _maxContains = _minContains  # noqa: N815

    def _allOf(self, value: Any) -> list[Any]:  # noqa: N802
        return [self._not_of(part) for part in self._listed(value, "allOf")]

    def _anyOf(self, value: Any) -> list[Any]:  # noqa: N802
        return [_all(*(self._not_of(part) for part in self._listed(value, "anyOf")))]

    def _oneOf(self, value: Any) -> list[Any]:  # noqa: N802
        """None of them; two at once would do as well."""
        return [_all(*(self._not_of(part) for part in self._listed(value, "oneOf")))]

    def _listed(self, value: Any, keyword: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong(self._path, f"{keyword} must be a list of schemas")
        return value

    def _not(self, value: Any) -> list[Any]:
        return [value]

    def _ref(self, value: Any) -> list[Any]:
        return [self._not_of(self._resolve(value))]

    def _if(self, value: Any) -> list[Any]:
        then, other = self._schema.get("then", True), self._schema.get("else", True)
        return [_all(value, self._not_of(then)), _all(self._not_of(value), self._not_of(other))]

    def _then(self, _: Any) -> list[Any]:
        return []

    _else = _then

    def _dependentRequired(self, _: Any) -> list[Any]:  # noqa: N802
        only = {"dependentRequired": self._schema["dependentRequired"]}
        return self._missed(only)

    def _dependentSchemas(self, _: Any) -> list[Any]:  # noqa: N802
        return self._missed({"dependentSchemas": self._schema["dependentSchemas"]})

    def _dependencies(self, _: Any) -> list[Any]:
        return self._missed({"dependencies": self._schema["dependencies"]})

    def _missed(self, schema: Schema) -> list[Any]:
        return [
            _all({"type": "object", "required": [name]}, self._not_of(needed))
            for name, needed in _dependent(schema, self._path)
        ]
