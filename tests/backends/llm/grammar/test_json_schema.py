"""Texts of a schema are valid by it, which an independent validator says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modelserver_backends.llm.grammar import compile_grammar
from support.grammars import check_examples, check_schema, is_match, json_tokenizer, random_text

_NAMES = st.sampled_from(["a", "b", "ab", "é", 'q"', "x/y", "~"])
_SCALARS: st.SearchStrategy[Any] = st.sampled_from([None, True, False, 0, 1, -3, 2.5, "", "a", 'q"\\', "é🙂\n"])
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(_NAMES, inner, max_size=2)),
    max_leaves=3,
)
_BOUNDS = st.sampled_from([-100, -7.5, -1, 0, 0.25, 1, 3.125, 12, 250])
_PATTERNS = st.sampled_from(["^a+$", "b", '^[^"]', "\\\\$", r"^\d{2}(-x)?", "^(é|🙂){1,2}$", r"\s", "^$"])


def _present(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


_LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.just(True),
    st.sampled_from([{"type": kind} for kind in ("null", "boolean", "integer", "number", "string", "object", "array")]),
    st.builds(
        lambda types: {"type": types},
        st.lists(st.sampled_from(["null", "integer", "string"]), min_size=1, max_size=3, unique=True),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, _VALUES),
    st.builds(
        lambda bounds: {"type": "string", **bounds}, _present(minLength=st.integers(0, 3), maxLength=st.integers(3, 6))
    ),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, _PATTERNS),
    st.builds(
        lambda kind, bounds: {"type": kind, **bounds},
        st.sampled_from(["integer", "number"]),
        _present(minimum=_BOUNDS, maximum=_BOUNDS, exclusiveMinimum=_BOUNDS, exclusiveMaximum=_BOUNDS),
    ),
    st.just({"$ref": "#/$defs/tree"}),
)


def _compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.builds(
        lambda properties, extra, required, bounds: {
            "type": "object",
            "properties": properties,
            **extra,
            "required": [
                name for name in required if name in properties or extra.get("additionalProperties", True) is not False
            ],
            **bounds,
        },
        st.dictionaries(_NAMES, inner, max_size=3),
        _present(additionalProperties=st.one_of(st.booleans(), inner)),
        st.lists(_NAMES, max_size=2, unique=True),
        _present(title=st.just("t")),
    )
    lists = st.builds(
        lambda fields: {"type": "array", **fields},
        _present(
            items=inner,
            prefixItems=st.lists(inner, min_size=1, max_size=2),
            minItems=st.integers(0, 2),
            maxItems=st.integers(2, 4),
        ),
    )
    return st.one_of(
        objects,
        lists,
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda kind, options: {"type": kind, "anyOf": options},
            st.sampled_from(["object", ["string", "null"]]),
            st.lists(objects, min_size=1, max_size=2),
        ),
        st.builds(lambda first, second: {"allOf": [first, second]}, objects, objects),
        st.builds(lambda options: {"oneOf": options}, st.lists(inner, min_size=2, max_size=2)),
    )


_SCHEMAS = st.recursive(_LEAVES, _compound, max_leaves=6)
_TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
    "required": ["next"],
    "additionalProperties": False,
}


_REFUSALS = ("no text matches", "not supported", "oneOf: alternatives", "deep, or in a circle")


@given(schema=_SCHEMAS, seed=st.integers(0, 1000))
@settings(max_examples=120)
def test_whatever_is_generated_is_valid(schema: Any, seed: int) -> None:
    document = {"$defs": {"tree": _TREE}, "allOf": [schema]} if schema is True else {"$defs": {"tree": _TREE}, **schema}
    check_schema(document, seed, refusals=_REFUSALS, max_tokens=80)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}},
    },
    "required": ["name"],
}
SHAPES = {
    "$defs": {
        "circle": {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "r": {"type": "number"}},
            "required": ["kind", "r"],
        },
        "square": {
            "type": "object",
            "properties": {"kind": {"const": "square"}, "a": {"type": "number"}},
            "required": ["kind", "a"],
        },
    },
    "oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square"}],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            PERSON,
            ['{"name":"a"}', '{ "name": "a", "age": 3, "tags": ["x", "y"] }', '{"name":"é\\n","tags":[]}'],
            ["{}", '{"age":3,"name":"a"}', '{"name":"a","age":-1}', '{"name":"a","other":1}', '{"name":"a",}'],
        ),
        (
            SHAPES,
            ['{"kind":"circle","r":1.5}', '{"kind":"square","a":2}'],
            ['{"kind":"circle","a":2}', '{"kind":"oval","r":1}'],
        ),
        ({"type": "object"}, ["{}", '{"a":{"b":[]}}'], ["[]"]),
        (
            {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "minProperties": 1},
            ['{"a":null}', '{"b":null}', '{"a":null,"b":null}'],
            ["{}"],
        ),
        (
            {"propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "integer"}},
            ["{}", '{"abc":1,"a":2}'],
            ['{"d":1}', '{"":1}', '{"a":null}'],
        ),
        ({"propertyNames": {"enum": ["x", "y"]}}, ['{"x":1}', '{"y":[],"x":{}}'], ['{"z":1}']),
        (
            {"type": "array", "items": {"enum": ["x", "y", "z", "x"]}, "uniqueItems": True, "minItems": 1},
            ['["x"]', '["x","z"]', '["x", "y", "z"]'],
            ["[]", '["x","x"]', '["z","x"]'],
        ),
        (
            {"type": "integer", "multipleOf": 7},
            ["0", "7", "-14", "700000000007", "91"],
            ["1", "70.0", "07", "92"],
        ),
        ({"type": "number", "multipleOf": 5, "minimum": 0}, ["0", "5", "105"], ["-5", "4", "5.5"]),
        ({"type": "integer", "multipleOf": 5, "exclusiveMaximum": 0}, ["-5", "-100"], ["0", "5"]),
        ({"type": "integer", "multipleOf": 250, "minimum": -600, "maximum": 700}, ["-500", "0", "500"], ["750", "5"]),
        ({"type": "integer", "multipleOf": 5, "minimum": -12}, ["-10", "-5", "0", "10"], ["-15"]),
        ({"type": "integer", "multipleOf": 1}, ["12", "-3"], ["1.5"]),
        ({"type": "object", "additionalProperties": False}, ["{}", "{ }"], ['{"a":1}']),
        (
            {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
            ['{"a":null}', '{"a":null,"b":null}'],
            ["{}", '{"a":1}', '{"a":null,"b":null,"c":null}'],
        ),
        (
            {"properties": {"ab": {"type": "null"}}, "additionalProperties": True},
            ["{}", '{"ab":null,"a":1,"abc":2}', '{"b":1}'],
            ['{"ab":1}', '{"a":1,"ab":1}', '{"\\u0061b":1}'],
        ),
        (
            {"allOf": [{"properties": {"a": True}, "additionalProperties": False}, {"properties": {"b": {}}}]},
            ["{}", '{"a":1}'],
            ['{"b":1}', '{"a":1,"b":1}'],
        ),
        ({"type": "object", "patternProperties": {"^x-": {"type": "integer"}}}, ['{"x-a":1}', "{}"], ['{"y":1}']),
        (
            {"properties": {"a": {"type": "null"}}, "required": ["b"]},
            ['{"b":[1]}', '{"a":null,"b":2}'],
            ['{"a":null}', '{"b":1,"c":2}'],
        ),
        (
            {"items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2, "maxItems": 2},
            ["[1,2]", "[1, 3]", "[2,3]"],
            ["[1]", "[1,1]", "[1,2,3]"],
        ),
        ({"type": "number", "multipleOf": 0.25, "maximum": 1}, ["0.75", "1"], ["0.3", "1.25"]),
        (
            {"patternProperties": {"^x": {"type": "null"}, "^y": {"type": "integer"}}, "properties": {"a": True}},
            ['{"a":1,"y1":2,"x":null}', "{}"],
            ['{"x":1}', '{"b":1}'],
        ),
        ({"type": "object", "required": ["a"]}, ['{"a":[1]}'], ["{}"]),
        (
            {"properties": {"a": True, "b": True, "c": {"type": "null"}}, "required": ["c"]},
            ['{"c":null}', '{"b":1,"c":null}', '{"a":1,"b":2,"c":null}'],
            ['{"a":1}', '{"c":null,"a":1}', '{,"c":null}'],
        ),
        ({"properties": {"a": True, "b": False}}, ["{}", '{"a":1}'], ['{"b":1}']),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
            ["[null]", "[null, null]"],
            ["[]", "[null,null,null]"],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
            ['[1,"a"]'],
            ["[]", "[1]", '[1,"a",2]'],
        ),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "null"}},
            ["[1]", "[1,null]"],
            ["[]", "[1,2]"],
        ),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 2}, ['[1,"x"]', "[1,2]"], ["[1]"]),
        (
            {"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "null"}},
            ["[1,null]"],
            ["[null]"],
        ),
        ({"type": "array", "items": False}, ["[]"], ["[1]"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"é\\n🙂"'], ['"a"', '"abcd"']),
        ({"type": "string"}, ['"\\"\\\\\\n"'], ['"\\u0041"', '"\\x"', '"\\ud83d"', '"\n"', '"a']),
        ({"enum": ["a", 1, None, {"b": [True]}]}, ['"a"', "1", "null", '{"b":[true]}'], ["2", '"1"', "true"]),
        ({"type": "integer", "enum": ["a", 1, 2.0, 2.5, True]}, ["1", "2"], ['"a"', "2.5", "true"]),
        ({"const": "x", "enum": ["x", "y"]}, ['"x"'], ['"y"']),
        ({"type": ["integer", "null"], "minimum": 5}, ["5", "null"], ["4"]),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"]),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "anyOf": [{"required": ["a"]}, {"properties": {"b": {"type": "null"}}}],
            },
            ['{"a":1}', '{"a":1,"b":null}', "{}"],
            ['{"b":1}'],
        ),
        (
            {
                "allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}, {"$ref": "#/$defs/even"}],
                "$defs": {"even": {"enum": [2, 4]}},
            },
            ["4"],
            ["2", "3", "5"],
        ),
        (
            {"allOf": [{"type": ["integer", "string"], "minimum": 3}, {"type": "number", "maximum": 5}]},
            ["3", "5"],
            ["2", '"a"'],
        ),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}, "description": "x"}, ["null"], ["1"]),
        ({"$ref": "#/$defs/s", "$defs": {"s": {"type": "string"}}, "maxLength": 1}, ['"a"'], ['"ab"']),
        ({"type": "array", "items": {"$ref": "#"}}, ["[]", "[[], [[]]]"], ["[1]"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["1", "0.5", "1.0"], ["0", "1.1", "0.0"]),
        ({"type": "integer", "exclusiveMinimum": 1.5, "exclusiveMaximum": 4}, ["2", "3"], ["1", "4"]),
        (
            {"format": "email", "$schema": "x", "title": "x", "x-vendor": 1, "uniqueItems": False},
            ['"a@b.com"'],
            ['"a"'],
        ),
        ({"type": "string", "format": "byte"}, ['"anything"'], ["1"]),
        (
            {"type": "string", "format": "uuid", "minLength": 36, "maxLength": 36},
            ['"123e4567-e89b-12d3-a456-426614174000"'],
            ['"x"'],
        ),
        ({"type": "string", "pattern": "^[ab]{2,3}$", "minLength": 1, "maxLength": 3}, ['"ab"'], ['"a"']),
        (
            {"allOf": [{"properties": {"a": {"type": "null"}}}, {"$ref": "#b"}], "unevaluatedProperties": False}
            | {"type": "object", "$defs": {"b": {"$anchor": "b", "properties": {"b": {"type": "null"}}}}}
            | {"properties": {"$anchor": {"type": "null"}}},
            ['{"a": null, "b": null}', "{}"],
            ['{"c": null}', '{"a": null, "c": null}'],
        ),
        (
            {"type": "object", "unevaluatedProperties": {"type": "null"}, "required": ["c"]}
            | {"anyOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}]},
            ['{"a": 1, "c": null}', '{"b": 2, "c": null}', '{"c": null}'],
            ['{"a": 1}', '{"a": 1, "c": 3}', '{"b": 1, "c": null}'],
        ),
        (  # what a part says of the unevaluated does not see what is beside the part
            {"allOf": [{"properties": {"a": {"type": "null"}}, "unevaluatedProperties": False}], "type": "object"}
            | {"properties": {"b": {"type": "null"}}},
            ["{}", '{"a": null}'],
            ['{"b": null}'],
        ),
        (
            {"type": "array", "prefixItems": [{"const": 1}], "allOf": [{"minItems": 1}], "unevaluatedItems": False},
            ["[1]"],
            ["[]", "[1, 2]"],
        ),
        (
            {"$dynamicRef": "#list", "$defs": {"l": {"$dynamicAnchor": "list", "items": {"$recursiveRef": "#"}}}},
            ["[]", "[[], [[]]]"],
            ["1", "[1]"],
        ),
    ],
)
def test_examples(schema: Any, good: list[str], bad: list[str]) -> None:
    check_examples(schema, good, bad)


@pytest.mark.parametrize(
    "form", ["date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "hostname", "email", "uri"]
)
def test_formats_are_valid(form: str) -> None:
    import datetime
    import ipaddress
    import urllib.parse
    import uuid

    readers: dict[str, Any] = {
        "date": datetime.date.fromisoformat,
        "time": lambda text: datetime.time.fromisoformat(text.replace("Z", "+00:00")),
        "date-time": datetime.datetime.fromisoformat,
        "uuid": uuid.UUID,
        "ipv4": ipaddress.IPv4Address,
        "ipv6": ipaddress.IPv6Address,
        "uri": urllib.parse.urlsplit,
    }
    grammar = compile_grammar({"json": {"type": "string", "format": form}}, json_tokenizer())
    texts = [random_text(grammar, json_tokenizer(), seed) for seed in range(25)]
    read = [readers.get(form, str)(json.loads(text)) for text in texts if text is not None]
    assert len(read) > 5


def test_deep_and_wide_schemas() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    grammar = compile_grammar({"json": deep}, json_tokenizer())
    assert is_match(grammar, '{"a":' * 100 + "1" + "}" * 100)
    wide = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(150)}}
    grammar = compile_grammar({"json": wide}, json_tokenizer())
    assert is_match(grammar, '{"p3":1,"p149":2}')
    assert not is_match(grammar, '{"p149":1,"p3":2}')


def test_names_that_look_like_places_are_kept_apart() -> None:
    schema = {
        "properties": {
            "a": {"type": "object", "properties": {"b": {"type": "object"}}},
            "a/properties/b": {"type": "array"},
        },
        "required": ["a/properties/b"],
    }
    grammar = compile_grammar({"json": schema}, json_tokenizer())
    assert is_match(grammar, '{"a":{"b":{}},"a/properties/b":[]}')
    assert not is_match(grammar, '{"a":{"b":[]},"a/properties/b":[]}')


def _with_unevaluated(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(_NAMES, st.sampled_from([{"type": "null"}, {"const": 1}]), max_size=2),
            "required": st.lists(_NAMES, max_size=1),
            "unevaluatedProperties": st.sampled_from([False, True, {"type": "null"}]),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "if": inner,
            "then": inner,
        },
    )


@settings(max_examples=40, deadline=None)
@given(
    schema=st.recursive(_with_unevaluated(st.just({"required": ["a"]})), _with_unevaluated, max_leaves=4),
    seed=st.integers(0, 99),
)
def test_what_is_unevaluated_is_as_an_independent_validator_sees_it(schema: Any, seed: int) -> None:
    refusals = ("not supported", "unsatisfiable", "is empty", "no value", "may match the same", "come to more than")
    check_schema(schema, seed, refusals=refusals, max_tokens=60)
