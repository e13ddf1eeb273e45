"""xgrammar where it is installed: its texts are valid too, and what it would bend goes to llguidance."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from modelserver_backends.llm.grammar import allowed_mask, compile_grammar
from modelserver_backends.llm.grammar.xgrammar_compiler import XgrammarGrammar
from support.grammars import check_texts, json_tokenizer

pytestmark = pytest.mark.tool("xgrammar")

compile_with_xgrammar = functools.partial(compile_grammar, engine="xgrammar")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"enum": ["x", "é", 1]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#"}, "value": {"type": "boolean"}},
    "required": ["value"],
}


@pytest.mark.parametrize("schema", [PERSON, TREE, {"enum": ["a", 1]}, {"type": "number"}])
def test_texts_are_valid(schema: Any) -> None:
    grammar = compile_with_xgrammar({"json": schema}, json_tokenizer())
    assert isinstance(grammar, XgrammarGrammar)
    assert check_texts(grammar, schema) > 5


def test_any_object() -> None:
    grammar = compile_with_xgrammar({"json_object": True}, json_tokenizer())
    assert isinstance(grammar, XgrammarGrammar)
    assert check_texts(grammar, {"type": "object"})


def test_a_matcher_takes_what_its_mask_allows_and_ends() -> None:
    tokenizer = json_tokenizer()
    grammar = compile_with_xgrammar({"json": {"enum": ["a", "b"]}}, tokenizer)
    first, second = grammar.matcher(), grammar.matcher()
    for token_id in tokenizer.encode('"a"', add_special_tokens=False):
        mask = allowed_mask(first)
        assert mask[token_id]
        accepted = [first.accepts(each) for each in range(tokenizer.vocab_size)]
        assert accepted == mask.tolist()
        assert not first.accept(tokenizer.encode("x", add_special_tokens=False)[0])
        assert not first.is_terminated
        assert first.accept(token_id)
    assert first.is_terminated
    assert np.flatnonzero(allowed_mask(first)).tolist() == [1]
    assert first.accept(1)
    assert first.is_terminated
    assert second.accept(tokenizer.encode('"', add_special_tokens=False)[0])


@pytest.mark.parametrize(
    "wanted",
    [
        {"choice": ["a"]},
        {"regex": "a+"},
        {"json": True},
        {"json": {"minimum": 3}},
        {"json": {"type": "integer", "multipleOf": 5}},
        {"json": {"type": "string", "pattern": "^a$"}},
        {"json": {"type": "string", "maxLength": 5}},
        {"json": {"type": "object", "properties": {"a": {"oneOf": [{"type": "null"}]}}}},
        {"json": {"enum": [1, 2], "allOf": [{"const": 1}]}},
    ],
)
def test_what_it_would_not_take_at_its_word_goes_to_llguidance(wanted: dict[str, Any]) -> None:
    assert not isinstance(compile_with_xgrammar(wanted, json_tokenizer()), XgrammarGrammar)
