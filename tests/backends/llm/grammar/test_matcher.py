"""Tokens are accepted as the mask says, and can be taken back; texts end when they are complete, and only then."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from modelserver_backends.llm.grammar import Matcher, allowed_mask, compile_grammar, fill_masks, unpacked
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.grammars import is_match, json_tokenizer
from support.tiny_tokenizers import byte_fallback, byte_level, word_piece

from modelserver.errors import InvalidArgumentError

EOS = 1
ENGINES = ["guidance", pytest.param("xgrammar", marks=pytest.mark.tool("xgrammar"))]


def _matcher(**wanted: object) -> Matcher:
    return compile_grammar(wanted, json_tokenizer()).matcher()


def _take(matcher: Matcher, text: str) -> list[int]:
    token_ids = json_tokenizer().encode(text)
    for token_id in token_ids:
        assert matcher.accept(token_id), text
    return token_ids


def test_the_end_comes_when_the_text_is_complete() -> None:
    matcher = _matcher(regex="ab+")
    _take(matcher, "a")
    assert not matcher.accepts(EOS)
    assert not allowed_mask(matcher)[EOS]
    assert not matcher.accept(EOS)
    _take(matcher, "bb")
    assert matcher.accepts(EOS)
    assert allowed_mask(matcher)[EOS]
    assert not matcher.is_terminated
    assert matcher.accept(EOS)
    assert matcher.is_terminated
    assert not matcher.accepts(json_tokenizer().encode("b")[0])


@pytest.mark.parametrize("wanted", [{"choice": ["yes", "no"]}, {"regex": "yes|no"}])
def test_nothing_can_follow_a_text_that_is_whole(wanted: dict[str, Any]) -> None:
    matcher = _matcher(**wanted)
    _take(matcher, "no")
    assert matcher.is_terminated
    assert np.flatnonzero(allowed_mask(matcher)).tolist() == [EOS]


@pytest.mark.parametrize("wanted", [{"choice": ["yes", "yeah"]}, {"regex": "ye(s|ah)"}])
def test_a_refused_token_changes_nothing(wanted: dict[str, Any]) -> None:
    matcher = _matcher(**wanted)
    before = allowed_mask(matcher)
    assert not matcher.accept(json_tokenizer().encode("n")[0])
    assert (allowed_mask(matcher) == before).all()
    _take(matcher, "yes")


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_mask_allows_is_accepted(engine: str) -> None:
    tokenizer = json_tokenizer()
    schema = {"type": "array", "items": {"enum": ["a", "é", 12]}}
    matcher = compile_grammar({"json": schema}, tokenizer, engine=engine).matcher()
    for text in ('["a"', ', "', "é", '", 12]'):
        mask = allowed_mask(matcher)
        accepted = np.array([matcher.accepts(token_id) for token_id in range(tokenizer.vocab_size)])
        assert mask.any()
        assert not (mask & ~accepted).any()  # it may leave out ways to write the same in more tokens
        _take(matcher, text)
    assert matcher.is_terminated


def test_choices_allow_what_they_accept() -> None:
    tokenizer, matcher = json_tokenizer(), _matcher(choice=["yes", "yes please", "no", "né", ""])
    for text in ("y", "es", " "):
        mask = allowed_mask(matcher)
        assert mask.tolist() == [matcher.accepts(token_id) for token_id in range(tokenizer.vocab_size)]
        _take(matcher, text)
    assert not matcher.accepts(EOS)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wanted", [{"json": {"enum": ["yes", "no", "yea"]}}, {"choice": ['"yes"', '"no"']}])
def test_tokens_are_taken_back(engine: str, wanted: dict[str, Any]) -> None:
    matcher = compile_grammar(wanted, json_tokenizer(), engine=engine).matcher()
    first = allowed_mask(matcher)
    _take(matcher, '"n')
    middle = allowed_mask(matcher)
    num_tokens = len(_take(matcher, 'o"'))
    assert matcher.accept(EOS)
    assert matcher.is_terminated
    matcher.rollback(num_tokens + 1)
    assert not matcher.is_terminated
    assert (allowed_mask(matcher) == middle).all()
    matcher.rollback(len(json_tokenizer().encode('"n')))
    assert (allowed_mask(matcher) == first).all()
    matcher.rollback(0)
    _take(matcher, '"yes"')


def test_masks_of_several_matchers_are_filled_at_once() -> None:
    wanted: list[dict[str, Any]] = [{"regex": "[ab]+"}, {"choice": ["x", "y"]}, {"regex": "c*"}, {"json": True}]
    matchers = [_matcher(**each) for each in wanted]
    _take(matchers[1], "x")
    bits = fill_masks(matchers)
    size = json_tokenizer().vocab_size
    assert bits.shape == (4, -(-size // 32))
    for row, matcher in zip(bits, matchers, strict=True):
        assert (unpacked(row, size) == allowed_mask(matcher)).all()
        assert unpacked(row, size).any()


@pytest.mark.parametrize("wanted", [{"regex": "(?s:.)*"}, {"json": True}, {"choice": ["<s>", "</s>"]}])
def test_special_tokens_are_never_part_of_a_text(wanted: dict[str, Any]) -> None:
    matcher, special = _matcher(**wanted), sorted(json_tokenizer().special_ids - {EOS})
    assert special
    assert not allowed_mask(matcher)[special].any()
    assert not any(matcher.accepts(token_id) for token_id in special)
    assert not matcher.accepts(json_tokenizer().vocab_size + 3)


@pytest.mark.parametrize("wanted", [{"regex": "[é🙂]{2}"}, {"choice": ["é🙂", "🙂é"]}])
def test_characters_may_be_split_among_tokens(wanted: dict[str, Any]) -> None:
    tokenizer = Tokenizer(byte_fallback(is_stripped=False), special={"eos_token": "</s>"})
    matcher = compile_grammar(wanted, tokenizer).matcher()
    for byte in "🙂é".encode():
        (token_id,) = [each for each in range(tokenizer.vocab_size) if tokenizer.token_bytes(each) == bytes([byte])]
        assert not matcher.accepts(tokenizer.eos_token_id or 0)
        assert allowed_mask(matcher)[token_id]
        assert matcher.accept(token_id)
    assert matcher.is_terminated


def test_a_tokenizer_without_an_end_of_a_text() -> None:
    tokenizer = Tokenizer(byte_level())
    assert not tokenizer.eos_token_ids
    matcher = compile_grammar({"regex": "ab"}, tokenizer).matcher()
    for token_id in tokenizer.encode("ab", add_special_tokens=False):
        assert allowed_mask(matcher)[token_id]
        assert matcher.accept(token_id)
    assert matcher.is_terminated
    assert len(allowed_mask(matcher)) == tokenizer.vocab_size


@functools.cache
def _words() -> Tokenizer:
    return Tokenizer(word_piece(), special={"eos_token": "</s>"})


@pytest.mark.parametrize("kind", ["regex", "choice"])
def test_a_vocabulary_that_cannot_go_on_ends_the_text(kind: str) -> None:
    def asked(text: str) -> dict[str, Any]:
        return {kind: text if kind == "regex" else [text]}

    with pytest.raises(InvalidArgumentError, match="vocabulary cannot write"):
        compile_grammar(asked("\u4e95"), _words())
    stuck = compile_grammar(asked("the\u4e95"), _words()).matcher()
    assert stuck.accept(_words().encode("the")[0])
    assert stuck.is_terminated
    assert stuck.accepts(_words().token_to_id("</s>") or 0)


def test_many_choices() -> None:
    texts = [f"choice number {number}" for number in range(20_000)]
    grammar = compile_grammar({"choice": texts}, json_tokenizer())
    assert is_match(grammar, "choice number 19999")
    assert not is_match(grammar, "choice number 20000")


def test_a_text_that_becomes_too_intricate_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from modelserver_backends.llm.grammar import guidance

    monkeypatch.setitem(guidance._LIMITS, "max_items_in_row", 60)
    tokenizer = Tokenizer(byte_level(), special={"bos_token": "<s>", "eos_token": "</s>"})
    grammar = compile_grammar({"grammar": 'root ::= "a" root root | "a" | "c"'}, tokenizer)
    matcher = grammar.matcher()
    a = tokenizer.encode("a", add_special_tokens=False)[0]
    for _ in range(200):
        mask = allowed_mask(matcher)
        if matcher.is_terminated:
            break
        assert mask[a]
        assert matcher.accept(a)
    assert matcher.is_terminated
    assert np.flatnonzero(allowed_mask(matcher)).tolist() == [EOS]
    assert matcher.accept(EOS)
