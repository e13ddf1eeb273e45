"""Detokenising and stopping together: the same text whatever the tokens, and whichever way they were grouped."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.text.text_stream import TextStream
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.tiny_tokenizers import byte_fallback, byte_level


@functools.cache
def _tokenizer(kind: str = "byte_level") -> Tokenizer:
    return Tokenizer({"byte_level": byte_level, "byte_fallback": byte_fallback}[kind](), special={"eos_token": "</s>"})


def _run(tokenizer: Tokenizer, groups: list[list[int]], params: SamplingParams) -> tuple[str, str | None]:
    stream, text = TextStream(tokenizer, [], params), ""
    for group in groups:
        delta, stop = stream.push(group)
        text += delta
        if stop is not None:
            return text, stop
    return text + stream.flush(), None


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(
    text=st.text(alphabet="the dog é🙂,", max_size=40),
    stop=st.lists(st.text(alphabet="the dog é🙂,", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 4),
    is_included=st.booleans(),
)
@settings(max_examples=100)
def test_a_stop_string_cuts_the_text_where_find_finds_it(
    kind: str, text: str, stop: list[str], size: int, is_included: bool
) -> None:
    tokenizer = _tokenizer(kind)
    token_ids = tokenizer.encode(text)
    groups = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    params = SamplingParams(stop=tuple(stop), include_stop_str_in_output=is_included)
    matches = [(text.find(one) + len(one), text.find(one), one) for one in stop if one in text]
    if matches:
        end, start, found = min(matches)
        assert _run(tokenizer, groups, params) == (text[: end if is_included else start], found)
    else:
        assert _run(tokenizer, groups, params) == (text, None)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_no_stop_string_before_min_tokens(size: int) -> None:
    tokenizer = _tokenizer()
    token_ids = tokenizer.encode("a.b.c.d.")
    assert len(token_ids) == 8
    groups = [token_ids[start : start + size] for start in range(0, len(token_ids), size)]
    for min_tokens, expected in ((0, "a"), (1, "a"), (2, "a.b"), (4, "a.b.c"), (7, "a.b.c.d"), (8, "a.b.c.d.")):
        text, stop = _run(tokenizer, groups, SamplingParams(stop=(".",), min_tokens=min_tokens))
        assert (text, stop) == (expected, None if min_tokens == 8 else ".")


def test_special_tokens_are_shown_when_asked_for() -> None:
    tokenizer = _tokenizer()
    token_ids = [*tokenizer.encode("a"), tokenizer.token_to_id("<|im_end|>") or 0, *tokenizer.encode("b")]
    assert _run(tokenizer, [token_ids], SamplingParams()) == ("ab", None)
    assert _run(tokenizer, [token_ids], SamplingParams(skip_special_tokens=False)) == ("a<|im_end|>b", None)
    assert _run(tokenizer, [token_ids], SamplingParams(stop=("<|im",), skip_special_tokens=False)) == ("a", "<|im")


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    tokenizer = _tokenizer()
    half = tokenizer.encode("ń")[:1]
    stream = TextStream(tokenizer, [], SamplingParams(stop=("xy",)))
    assert stream.push([*tokenizer.encode("ax"), *half]) == ("a", None)
    assert stream.flush() == "x\N{REPLACEMENT CHARACTER}"
