"""Conditions and negations: their texts are valid by an independent validator, and examples go as they should."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modelserver_backends.llm.grammar import compile_grammar
from support.grammars import check_examples, check_schema, is_match, json_tokenizer

_NAMES = st.sampled_from(["a", "b", "kind"])
_VALUES: st.SearchStrategy[Any] = st.sampled_from([None, True, 0, 1, 2.5, "", "a", "ab", "é", [], [1], {}, {"a": 1}])
_PATTERNS = st.sampled_from(["^a+$", "b", "^[^a]", "^(a|b){1,3}$", "é"])
_LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["object", "array", "string", "integer", "number", "null"])),
    st.builds(lambda value: {"const": value}, _VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=3)),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, _PATTERNS),
    st.fixed_dictionaries(
        {}, optional={"minimum": st.integers(-2, 2), "maxLength": st.integers(0, 3), "minItems": st.integers(0, 2)}
    ),
    st.builds(lambda name: {"required": [name]}, _NAMES),
)


def _compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.builds(
        lambda given, required: {"type": "object", "properties": given, "required": required},
        st.dictionaries(_NAMES, inner, max_size=2),
        st.lists(_NAMES, max_size=1),
    )
    lists = st.fixed_dictionaries(
        {"type": st.just("array"), "contains": inner},
        optional={
            "items": inner,
            "minContains": st.integers(0, 2),
            "maxContains": st.integers(0, 2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(1, 3),
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
        },
    )
    conditions = st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "string", "array"]),
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
            "dependentRequired": st.dictionaries(_NAMES, st.lists(_NAMES, max_size=2, unique=True), max_size=2),
            "dependentSchemas": st.dictionaries(_NAMES, inner, max_size=1),
            "properties": st.dictionaries(_NAMES, inner, max_size=2),
            "additionalProperties": st.booleans(),
        },
    )
    several = st.builds(
        lambda word, options: {word: options},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=2),
    )
    return st.one_of(properties, lists, conditions, conditions, several)


_REFUSALS = ("no text matches", "not supported", "oneOf: alternatives", "come to more than", "minProperties")


@given(schema=st.recursive(_LEAVES, _compound, max_leaves=6), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_whatever_is_generated_is_valid(schema: Any, seed: int) -> None:
    check_schema(schema, seed, refusals=_REFUSALS, max_tokens=60)


def _kind(name: str, *required: str) -> dict[str, Any]:
    """If it is of this kind, it has these properties."""
    return {
        "if": {"properties": {"kind": {"const": name}}, "required": ["kind"]},
        "then": {"required": list(required)},
    }


_SHAPE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["circle", "square", "point"]},
        "r": {"type": "integer"},
        "a": {"type": "integer"},
    },
    "required": ["kind"],
    "allOf": [_kind("circle", "r"), _kind("square", "a")],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            _SHAPE,
            ['{"kind":"circle","r":1}', '{"kind":"point"}', '{"kind":"square","r":1,"a":2}'],
            ['{"kind":"circle"}', '{"kind":"square","r":1}', '{"kind":"oval"}', "{}"],
        ),
        (
            {
                "properties": {"country": {"enum": ["us", "nl"]}, "code": {"type": "string"}},
                "required": ["country", "code"],
                "if": {"properties": {"country": {"const": "us"}}},
                "then": {"properties": {"code": {"pattern": "^[0-9]{5}$"}}},
                "else": {"properties": {"code": {"pattern": "^[0-9]{4} [A-Z]{2}$"}}},
            },
            ['{"country":"us","code":"12345"}', '{"country":"nl","code":"1234 AB"}'],
            ['{"country":"us","code":"1234 AB"}', '{"country":"nl","code":"12345"}'],
        ),
        (
            {
                "properties": {"card": {"type": "null"}, "name": {"type": "null"}, "zip": {"type": "null"}},
                "dependentRequired": {"card": ["name"], "zip": ["name", "card"]},
            },
            ["{}", '{"name":null}', '{"card":null,"name":null}', '{"card":null,"name":null,"zip":null}'],
            ['{"card":null}', '{"name":null,"zip":null}'],
        ),
        (
            {
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}, "required": ["b"]}},
            },
            ['{"b":1}', '{"a":1,"b":5}'],
            ['{"a":1}', '{"a":1,"b":4}'],
        ),
        ({"type": "string", "not": {"enum": ["ab", "é"]}}, ['"a"', '"abc"', '""', '"q"'], ['"ab"', '"é"']),
        ({"type": "string", "not": {"const": "b"}, "maxLength": 2}, ['"aa"', '"\\n"', '"ba"'], ['"b"', '"aaa"']),
        ({"type": "string", "pattern": "a", "maxLength": 3}, ['"a"', '"xax"'], ['"aaaa"', '"b"']),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ['"ab"', '"xbya"'], ['"a"', '"b"']),
        ({"type": "integer", "not": {"const": 5}}, ["4", "6", "-5"], ["5", "05", "5.0"]),
        ({"type": "number", "not": {"enum": [0, 1]}}, ["0.5", "2", "-1"], ["0", "1", "0.0", "1.0"]),
        ({"not": {"type": ["object", "array", "number"]}}, ["null", '"a"', "true"], ["{}", "[]", "1"]),
        ({"not": {"const": True}, "type": "boolean"}, ["false"], ["true"]),
        ({"not": {"const": []}, "type": "array"}, ["[1]"], ["[]"]),
        (
            {"type": "object", "not": {"required": ["a"]}, "additionalProperties": {"type": "null"}},
            ["{}", '{"b":null}'],
            ['{"a":null}'],
        ),
        ({"not": {"not": {"type": "null"}}}, ["null"], ["1"]),
        ({"enum": ["a", "b", 3], "not": {"const": "a"}, "type": "string"}, ['"b"'], ['"a"', "3"]),
        ({"type": "array", "contains": {"const": 1}}, ["[1]", "[2,1,3]"], ["[]", "[2]"]),
        (
            {"items": {"enum": [1, 2]}, "contains": {"const": 1}, "minContains": 1, "maxContains": 2, "maxItems": 3},
            ["[1]", "[1,2,1]", "[2,1]"],
            ["[]", "[2]", "[1,1,1]", "[1,2,2,2]"],
        ),
        ({"items": {"enum": [1, 2]}, "contains": {"const": 1}, "maxContains": 1}, ["[1]", "[2,1,2]"], ["[1,2,1]"]),
        (
            {"prefixItems": [{"const": 1}], "items": {"type": "integer"}, "contains": {"minimum": 5}, "minItems": 3},
            ["[1,2,5]", "[1,7,2,3]"],
            ["[1,2,3]", "[5,5,5]", "[1,5]"],
        ),
        ({"not": {"items": {"type": "integer"}}, "type": "array"}, ['["a"]', "[1,null]"], ["[]", "[1]"]),
        (
            {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
            ["2", "6"],
            ["3", "4", "5"],
        ),
        (
            {
                "anyOf": [{"type": "integer"}, {"type": "null"}],
                "oneOf": [{"type": "integer", "minimum": 3}, {"type": "null"}],
            },
            ["3", "null"],
            ["2"],
        ),
    ],
)
def test_examples(schema: Any, good: list[str], bad: list[str]) -> None:
    check_examples(schema, good, bad)


def test_many_kinds_are_told_apart_in_time() -> None:
    """As many conditions would be 2**40 alternatives, if those that contradict each other were kept."""
    names = [f"k{number}" for number in range(40)]
    properties = {"kind": {"enum": names}, **{f"of {name}": {"type": "null"} for name in names}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["kind"],
        "allOf": [_kind(name, f"of {name}") for name in names],
    }
    grammar = compile_grammar({"json": schema}, json_tokenizer())
    assert is_match(grammar, '{"kind":"k7","of k7":null}')
    assert not is_match(grammar, '{"kind":"k7","of k8":null}')
