"""Pieces of text are complete characters, and together the decode of the whole; for every kind of tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from modelserver_backends.llm.text.detokenizer import make_detokenizer
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.tiny_tokenizers import KINDS, TEXTS
from tokenizers import models, pre_tokenizers, trainers

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@functools.cache
def _tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), special=SPECIAL)


def _stream(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    *,
    prompt: Sequence[int] = (),
    sizes: Sequence[int] = (1,),
    **flags: bool,
) -> list[str]:
    """The pieces that come of pushing so many tokens at a time, over and over."""
    detokenizer = make_detokenizer(tokenizer, prompt, **flags)
    pieces, place, turn = [], 0, 0
    while place < len(token_ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(list(token_ids[place : place + size])))
        place, turn = place + size, turn + 1
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(kind: str, text: str) -> None:
    tokenizer = _tokenizer(kind)
    token_ids = tokenizer.encode(text)
    assert "".join(_stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=60)
def test_any_text_is_streamed_as_it_is_decoded(kind: str, text: str, sizes: list[int]) -> None:
    tokenizer = _tokenizer(kind)
    token_ids = tokenizer.encode(text)
    pieces = _stream(tokenizer, token_ids, sizes=sizes)
    assert "".join(pieces) == tokenizer.decode(token_ids)
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@given(data=st.data())
@settings(max_examples=100)
def test_any_tokens_are_streamed_as_they_are_decoded(kind: str, data: st.DataObject) -> None:
    tokenizer = _tokenizer(kind)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    streamed = "".join(_stream(tokenizer, token_ids, skip_special_tokens=skip))
    assert streamed == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(data=st.data())
@settings(max_examples=100)
def test_runs_of_bytes_that_are_no_text(data: st.DataObject) -> None:
    """All bytes of a run are replaced if it goes wrong before a character of it was complete."""
    tokenizer = _tokenizer("byte_fallback")
    wrong = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0xFF, 0x80, 0xE4, 0xF0)]
    words = [tokenizer.encode(word)[-1] for word in ("the", "was", "x")]
    token_ids = data.draw(st.lists(st.sampled_from([*wrong, *words]), max_size=12))
    assert "".join(_stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=3),
    vocab_size=st.integers(256, 300),
    text=st.text(max_size=40),
)
@settings(max_examples=25)
def test_tokenizers_trained_on_anything(texts: list[str], vocab_size: int, text: str) -> None:
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = Tokenizer(raw)
    assert "".join(_stream(tokenizer, tokenizer.encode(text))) == text


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_unstripped", "metaspace"])
@given(text=st.text(alphabet="ab é你🙂 ", max_size=20), cut=st.integers(0, 30))
@settings(max_examples=60)
def test_text_follows_a_prompt(kind: str, text: str, cut: int) -> None:
    """Prompt and continuation are decoded as one text: spaces between them stay, characters they share are whole."""
    tokenizer = _tokenizer(kind)
    token_ids = tokenizer.encode(text)
    prompt, output = token_ids[:cut], token_ids[cut:]
    before = "".join(_stream(tokenizer, prompt)[:-1])
    assert before + "".join(_stream(tokenizer, output, prompt=prompt)) == tokenizer.decode(token_ids)


def test_a_prompt_of_special_tokens_is_the_start_of_a_text() -> None:
    tokenizer = _tokenizer("byte_fallback")
    bos = tokenizer.bos_token_id
    assert bos is not None
    token_ids = tokenizer.encode("the best")
    assert "".join(_stream(tokenizer, token_ids, prompt=[bos])) == "the best"
    assert "".join(_stream(tokenizer, token_ids, prompt=[*tokenizer.encode("It was"), bos])) == " the best"


@pytest.mark.parametrize("kind", KINDS)
def test_characters_come_as_soon_as_they_are_complete(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    pieces = _stream(tokenizer, tokenizer.encode("the dog was lazy"))
    assert pieces[-1] == ""
    assert sum(1 for piece in pieces if piece) >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_a_token_give_nothing(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    token_ids = tokenizer.encode("the dog")
    padded = [token_ids[0], tokenizer.vocab_size + 5, *token_ids[1:], tokenizer.vocab_size]
    assert "".join(_stream(tokenizer, padded)) == tokenizer.decode(token_ids)


def test_what_never_becomes_a_character_is_not_held_for_ever() -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = _tokenizer(kind)
        byte = tokenizer.token_to_id("<0xFF>") if kind == "byte_fallback" else tokenizer.token_to_id("ÿ")
        assert byte is not None
        pieces = _stream(tokenizer, [byte] * 20)
        assert sum(len(piece) for piece in pieces[:-1]) >= 19
