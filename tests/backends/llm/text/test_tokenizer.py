"""Tokenizers as their directories describe them: the same ids as transformers, special tokens, ends, and errors."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.checkpoints import tokenizer_of
from support.tiny_tokenizers import KINDS, TEXTS, byte_fallback, byte_level, with_bos, write_tokenizer

from modelserver.errors import InvalidArgumentError


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    directory = write_tokenizer(tmp_path, with_bos(KINDS[kind]()))
    ours, theirs = (
        tokenizer_of(directory),
        PreTrainedTokenizerFast.from_pretrained(directory),
    )
    for text in [*TEXTS, "", " ", "<|im_start|>user", "a<tool call>b"]:
        for add_special_tokens in (True, False):
            token_ids = ours.encode(text, add_special_tokens=add_special_tokens)
            assert token_ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        for skip in (True, False):
            assert ours.decode(token_ids, skip_special_tokens=skip) == theirs.decode(
                token_ids, skip_special_tokens=skip
            )
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_tokens == {
        key: value for key, value in theirs.special_tokens_map.items() if isinstance(value, str)
    }


@pytest.mark.parametrize("longest", [None, 200_000])
def test_other_threads_run_while_a_long_text_is_read(tmp_path: Path, longest: int | None) -> None:
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, byte_level()))
    num_turns = 0
    with ThreadPoolExecutor() as pool:
        encoding = pool.submit(tokenizer.encode, "it waits, for the next one " * 50_000, longest=longest)
        while not encoding.done():
            time.sleep(0.001)
            num_turns += 1
    assert num_turns > 5


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_cut_as_transformers_cuts_them(tmp_path: Path, kind: str) -> None:
    from transformers import PreTrainedTokenizerFast

    directory = write_tokenizer(tmp_path, with_bos(KINDS[kind]()))
    ours, theirs = (
        tokenizer_of(directory),
        PreTrainedTokenizerFast.from_pretrained(directory),
    )
    for text in [*TEXTS, ""]:
        for longest in (2, 5, 1000):
            cut = theirs.encode(text, truncation=True, max_length=longest)
            assert ours.encode(text, longest=longest) == cut
        assert ours.encode(text, longest=1) == ours.encode(text)[:1]
        assert ours.encode(text, False, longest=3) == ours.encode(text, False)[:3]


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        (None, None, {1}),
        ({"eos_token_id": 3}, None, {1, 3}),
        ({"eos_token_id": [1, 3, 9]}, {"eos_token_id": 7}, {1, 3, 9}),
        ({}, {"eos_token_id": 7}, {1, 7}),
        ({"eos_token_id": None}, {"eos_token_id": True}, {1}),
    ],
)
def test_ends_of_a_text(tmp_path: Path, generation_config: Any, config: Any, expected: set[int]) -> None:
    directory = write_tokenizer(tmp_path, byte_level(), generation_config=generation_config)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    assert tokenizer_of(directory).eos_token_ids == expected


def test_special_tokens_from_either_file(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path, byte_level(), config={"bos_token": None, "eos_token": "<|im_end|>"})
    (directory / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    )
    tokenizer = tokenizer_of(directory)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|im_end|>")


def test_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    added = {"500": {"content": "<extra>", "special": True}, "501": {"content": "<plain>", "special": False}}
    directory = write_tokenizer(tmp_path, byte_level(), config={"added_tokens_decoder": added, "pad_token": "<pad>"})
    tokenizer = tokenizer_of(directory)
    token_ids = tokenizer.encode("a<extra>b<plain>c<pad>")
    assert tokenizer.decode(token_ids) == "ab<plain>c"
    assert tokenizer.token_to_id("<pad>") in tokenizer.special_ids


def test_bytes_of_tokens() -> None:
    tokenizer = Tokenizer(byte_level(), special={"eos_token": "</s>"})
    for text in TEXTS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(1) == b"</s>"
    assert tokenizer.visible_bytes[1] == b""
    assert tokenizer.token_bytes(10_000) == b""
    half = tokenizer.encode("ń")[0]
    assert tokenizer.token_text(half) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None
    fallback = Tokenizer(byte_fallback())
    assert fallback.token_bytes(fallback.token_to_id("<0xE4>") or 0) == b"\xe4"


def test_truncation_and_padding_of_the_file_do_not_count(tmp_path: Path) -> None:
    raw = byte_level()
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, raw))
    assert tokenizer.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer.json, so text cannot become tokens"),
        ({"tokenizer.model": "x"}, r"only tokenizer.model \(a SentencePiece model\); convert it once"),
        ({"vocab.json": "{}", "merges.txt": ""}, "slow BPE"),
        ({"tokenizer.json": "{"}, "cannot be read by the library tokenizers"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidArgumentError, match=message):
        tokenizer_of(tmp_path)


def test_a_directory_that_is_not_there_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"there is no directory .*nothing is downloaded"):
        tokenizer_of(tmp_path / "org" / "model")


@pytest.mark.parametrize(("name", "content"), [("tokenizer_config.json", "{"), ("generation_config.json", "[1]")])
def test_files_that_are_no_objects_are_named(tmp_path: Path, name: str, content: str) -> None:
    directory = write_tokenizer(tmp_path, byte_level())
    (directory / name).write_text(content)
    with pytest.raises(InvalidArgumentError, match=name):
        tokenizer_of(directory)


def test_half_of_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, byte_level()))
    with pytest.raises(InvalidArgumentError, match="half of a surrogate pair"):
        tokenizer.encode("a\ud800b")
    assert tokenizer.encode("a\U0001f600b")


def test_a_decoder_that_joins_by_spaces() -> None:
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = Tokenizer(raw)
    assert tokenizer.concatenation is None
    assert tokenizer.token_bytes(1) == b"b"
    assert tokenizer.decode([0, 1]) == "a b"


@pytest.mark.parametrize(
    "text", ["it waits for the next one " * 9000, "größer, als man denkt: 漢字。" * 6000, "a" * 100_000]
)
def test_a_text_in_bytes_has_the_tokens_of_the_string(tmp_path: Path, text: str) -> None:
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, byte_level()))
    assert tokenizer.encode(text.encode()) == tokenizer.encode(text)
    assert tokenizer.encode(text.encode(), longest=10) == tokenizer.encode(text, longest=10)


def test_a_long_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    for raw in (b"words " * 30_000 + b"\xff", b"words " * 30_000 + "ö".encode()[:1]):
        with pytest.raises(InvalidArgumentError, match="the text is not UTF-8"):
            tokenizer_of(write_tokenizer(tmp_path, byte_level())).encode(raw)


def test_a_long_text_without_a_place_to_cut_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_tokenizer(tmp_path, byte_level()))
    for text in ("a" * 3_000_000, b"a" * 3_000_000):
        with pytest.raises(InvalidArgumentError, match="characters"):
            tokenizer.encode_array(text)
