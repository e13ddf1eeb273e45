"""What of a schema is not supported is refused by name, and so is a schema that no value satisfies."""

from __future__ import annotations

from typing import Any

import pytest
from modelserver_backends.llm.grammar import compile_grammar
from support.grammars import json_tokenizer

from modelserver.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            {"properties": {"a": {"not": {"format": "date"}}}},
            "at #/properties/a/not: keyword 'format' is not supported",
        ),
        ({"unevaluatedProperties": False, "not": {"required": ["a"]}}, "at #: unevaluatedProperties beside not, if"),
        ({"not": {"unevaluatedProperties": False}}, "keyword 'unevaluatedProperties' is not supported inside of not"),
        ({"unevaluatedItems": False, "contains": {}}, "unevaluatedItems beside contains"),
        ({"$ref": "#nowhere"}, "'#nowhere' leads nowhere"),
        ({"$ref": "#a", "$defs": {"b": {"$anchor": "a"}, "c": {"$anchor": "a"}}}, "leads to several places"),
        ({"$dynamicRef": "#", "$ref": "#"}, "beside"),
        ({"not": {"additionalProperties": False}}, "keyword 'additionalProperties' is not supported inside of not"),
        ({"not": {"prefixItems": [{}], "items": {}}}, "keyword 'prefixItems' is not supported"),
        ({"not": {"$ref": "#"}}, "in a circle"),
        ({"not": 3}, "a schema is an object"),
        ({"not": {"anyOf": 3}}, "anyOf must be a list"),
        ({"dependentRequired": {"a": "b"}}, "'a' is not what it should be"),
        ({"dependentRequired": []}, "dependentRequired must be an object"),
        ({"dependencies": {"a": [1]}}, "must be a list of names"),
        ({"contains": {}, "uniqueItems": True}, "uniqueItems beside contains"),
        ({"minContains": -1, "contains": {}}, "minContains must be"),
        (
            {"allOf": [{"anyOf": [{"minimum": n}, {"title": str(n), "maximum": -n}]} for n in range(12)]},
            "come to more than 512",
        ),
        (
            {"properties": {"a": {"type": "object", "properties": {"b": {"type": "string", "pattern": "(a"}}}}},
            "at #/properties/a: unclosed group",
        ),
        ({"type": "string", "pattern": "a{2}+"}, "possessive repetitions are not supported"),
        ({"not": {"pattern": "b"}}, "at #/not: keyword 'pattern' is not supported inside of not"),
        ({"multipleOf": 0}, "multipleOf must be a number above 0"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"a": True}}, "propertyNames beside properties"),
        ({"type": "text"}, "type 'text' is none of"),
        ({"type": 5}, "type 5 is none of"),
        (["a"], "a schema is an object"),
        ({"properties": {"a": 5}}, "at #/properties/a: a schema is an object"),
        ({"properties": []}, "properties must be"),
        ({"required": "a"}, "required must be"),
        ({"minLength": -1}, "minLength must be"),
        ({"type": "string", "maxLength": "3"}, "maxLength must be"),
        ({"minimum": "3"}, "minimum must be a number"),
        ({"type": "number", "exclusiveMinimum": True}, "exclusiveMinimum must be a number"),
        ({"enum": 3}, "enum must be a list"),
        ({"anyOf": []}, "anyOf must be a list"),
        ({"allOf": 3}, "allOf must be a list"),
        ({"$ref": "http://x"}, "only places in the same schema"),
        ({"$ref": "#/$defs/a"}, "leads nowhere"),
        ({"$ref": "#"}, "in a circle"),
        ({"allOf": [{"$ref": "#"}]}, "in a circle"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: alternatives 0 and 1"),
        ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, "oneOf: alternatives"),
        ({"minProperties": 2}, "minProperties above"),
        ({"properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}, "at #: min/maxProperties only supported"),
        ({"patternProperties": {"a": {}, "b": {}}}, "are not disjoint"),
        (
            {"allOf": [{"additionalProperties": False}, {"patternProperties": {"b": {}}}]},
            "additionalProperties and patternProperties in two parts",
        ),
        ({"allOf": [{"items": {}}, {"prefixItems": [{}]}]}, "first entries of a list in one part"),
        ({"allOf": [{"properties": 5}, {"properties": {}}]}, "properties must be"),
        ({"allOf": [{"maximum": "5"}, {"maximum": 3}]}, "maximum must be a number"),
        ({"const": "\ud800"}, "is not JSON"),
    ],
)
def test_what_is_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        compile_grammar({"json": schema}, json_tokenizer())


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"properties": {"a": False}, "required": ["a"]},
        {"type": "null", "const": 1},
        {"type": "array", "items": False, "minItems": 1},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"additionalProperties": False, "required": ["a"]},
        {"not": {}},
        {"not": True},
        {"enum": ["a"], "minLength": 2},
        {"type": "string", "format": "uuid", "minLength": 40},
        {"type": "string", "const": "a", "not": {"enum": ["a", "b"]}},
        {"contains": {"const": 1}, "items": {"const": 2}},
        {"contains": {}, "minContains": 2, "maxContains": 1},
        {"type": "null", "if": {"type": "null"}, "then": False},
    ],
)
def test_schemas_that_no_value_satisfies(schema: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="no text matches"):
        compile_grammar({"json": schema}, json_tokenizer())
