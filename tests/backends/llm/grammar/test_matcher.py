"""Tokens are accepted as the mask says; texts end when they are complete, and only then."""

from __future__ import annotations

import json

import numpy as np
import pytest
from modelserver_backends.llm.grammar import Matcher, matcher
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.grammars import compile_builtin as compile_grammar
from support.grammars import json_tokenizer, random_text
from support.tiny_tokenizers import word_piece

from modelserver.errors import InvalidArgumentError


def _matcher(**wanted: object) -> Matcher:
    return compile_grammar(wanted, json_tokenizer()).matcher()


def _take(matcher: Matcher, text: str) -> None:
    for token_id in json_tokenizer().encode(text):
        assert matcher.accept(token_id), text


EOS = 1


def test_the_end_comes_when_the_text_is_complete() -> None:
    matcher = _matcher(regex="ab+")
    _take(matcher, "a")
    assert not matcher.accepts(EOS)
    assert not matcher.allowed_mask()[EOS]
    assert not matcher.accept(EOS)
    _take(matcher, "bb")
    assert matcher.accepts(EOS)
    assert matcher.allowed_mask()[EOS]
    assert not matcher.is_terminated
    assert matcher.accept(EOS)
    assert matcher.is_terminated
    assert not matcher.accepts(json_tokenizer().encode("b")[0])


def test_nothing_can_follow_a_text_that_is_whole() -> None:
    matcher = _matcher(choice=["yes", "no"])
    _take(matcher, "no")
    assert matcher.is_terminated
    assert np.flatnonzero(matcher.allowed_mask()).tolist() == [EOS]


def test_a_refused_token_changes_nothing() -> None:
    matcher = _matcher(choice=["yes"])
    before = matcher.allowed_mask()
    assert not matcher.accept(json_tokenizer().encode("n")[0])
    assert (matcher.allowed_mask() == before).all()
    _take(matcher, "yes")


def test_masks_and_acceptance_agree() -> None:
    tokenizer, matcher = json_tokenizer(), _matcher(json={"type": "array", "items": {"type": "string", "maxLength": 4}})
    for text in ('["a', 'é"', ", ", '"', '"]'):
        mask = matcher.allowed_mask()
        assert mask.tolist() == [matcher.accepts(token_id) for token_id in range(tokenizer.vocab_size)]
        _take(matcher, text)


def test_tokens_that_are_no_text_are_refused() -> None:
    matcher = _matcher(regex=".*")
    assert not matcher.accepts(0)
    assert not matcher.accepts(json_tokenizer().vocab_size + 3)
    assert not matcher.allowed_mask()[[0, 2, 3]].any()


def test_masks_are_shared_and_read_only() -> None:
    grammar = compile_grammar({"regex": "[a-z]+x"}, json_tokenizer())
    first, second = grammar.matcher(), grammar.matcher()
    assert first.allowed_mask() is second.allowed_mask()
    with pytest.raises(ValueError, match="read-only"):
        first.allowed_mask()[0] = True


def test_automata_that_grow_too_large_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "_MAX_CONFIGURATIONS", 20)
    monkeypatch.setattr(matcher, "_MAX_MASK_BYTES", 1)
    grammar = compile_grammar({"json": {"type": "array"}}, json_tokenizer())
    waiting = grammar.matcher()
    _take(waiting, '[[["a", ')
    texts = [random_text(grammar, json_tokenizer(), seed) for seed in range(20)]
    for text in texts:
        assert text is None or isinstance(json.loads(text), list)
    assert any(text is not None for text in texts)
    _take(waiting, "1]]]")
    assert waiting.is_terminated


def test_a_vocabulary_that_cannot_go_on_ends_the_text() -> None:
    tokenizer = Tokenizer(word_piece(), special={"eos_token": "</s>"})
    grammar = compile_grammar({"regex": "the(\u4e95|\u4e96)?"}, tokenizer)
    with pytest.raises(InvalidArgumentError, match="vocabulary cannot write"):
        compile_grammar({"regex": "\u4e95"}, tokenizer)
    matcher = grammar.matcher()
    assert matcher.accept(tokenizer.encode("the")[0])
    assert matcher.is_terminated
    stuck = compile_grammar({"regex": "the\u4e95"}, tokenizer).matcher()
    assert stuck.accept(tokenizer.encode("the")[0])
    assert stuck.is_terminated
    assert stuck.accepts(tokenizer.token_to_id("</s>") or 0)
