"""llguidance where it is installed: its texts are valid too, and what it refuses our own engine gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from modelserver_backends.llm.grammar import compile_grammar, guidance
from modelserver_backends.llm.grammar.matcher import ProgramGrammar
from support.grammars import check_texts, json_tokenizer

from modelserver.errors import InvalidArgumentError

pytestmark = pytest.mark.tool("llguidance")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "multipleOf": 5}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "schema", [PERSON, {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, {"enum": ["a", 1]}]
)
def test_texts_are_valid(schema: Any) -> None:
    grammar = compile_grammar({"json": schema}, json_tokenizer())
    assert isinstance(grammar, guidance.GuidanceGrammar)
    assert check_texts(grammar, schema) > 5


def test_any_object() -> None:
    grammar = compile_grammar({"json_object": True}, json_tokenizer())
    assert check_texts(grammar, {"type": "object"})


def test_what_the_mask_allows_is_accepted() -> None:
    tokenizer = json_tokenizer()
    matcher = compile_grammar({"regex": "(ab)+c?"}, tokenizer).matcher()
    for text in ("a", "ba", "b"):
        mask = matcher.allowed_mask()
        accepted = np.array([matcher.accepts(token_id) for token_id in range(tokenizer.vocab_size)])
        assert mask.any()
        assert not (mask & ~accepted).any()  # it leaves out ways to write the same in more tokens
        for token_id in tokenizer.encode(text):
            assert matcher.accept(token_id)
    assert matcher.accepts(1)
    assert not matcher.is_terminated
    assert not matcher.accept(tokenizer.encode("x")[0])
    assert matcher.accept(tokenizer.encode("c")[0])
    assert matcher.is_terminated
    assert np.flatnonzero(matcher.allowed_mask()).tolist() == [1]
    assert matcher.accept(1)


def test_matchers_of_one_grammar_are_apart() -> None:
    grammar, tokenizer = compile_grammar({"regex": "a|b"}, json_tokenizer()), json_tokenizer()
    first, second = grammar.matcher(), grammar.matcher()
    assert first.accept(tokenizer.encode("a")[0])
    assert second.accept(tokenizer.encode("b")[0])
    assert first.is_terminated


def test_what_it_has_no_word_for_goes_to_our_own() -> None:
    for wanted in ({"choice": ["a"]}, {"grammar": 'root ::= "a"'}, {"json": True}):
        assert isinstance(compile_grammar(wanted, json_tokenizer()), ProgramGrammar)
    with pytest.raises(InvalidArgumentError, match="'unevaluatedItems' is not supported"):
        compile_grammar({"json": {"unevaluatedItems": False}}, json_tokenizer())
    with pytest.raises(InvalidArgumentError, match="without"):
        compile_grammar({"regex": "(a"}, json_tokenizer())
