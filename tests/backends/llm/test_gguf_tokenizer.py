"""Tokenizers in the metadata of GGUF files."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.text.tokenizer import Tokenizer

from modelserver.errors import InvalidArgumentError, UnsupportedError

SPACE = "\u2581"
KINDS = gguf.TokenType
WORDS = ["the", "server", "answers", "every", "request", "a", "token", "toke", "to", "ken", "an", "swers"]


def written(path: Path, model: str, tokens: Sequence[str], kinds: Sequence[int], **metadata: object) -> Tokenizer:
    """The tokenizer of a file that has little else. Names of metadata are without their prefix."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    for name, value in metadata.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_checkpoint(path) as checkpoint:
        return Tokenizer.from_checkpoint(checkpoint)


def pieces() -> tuple[list[str], list[int], list[float]]:
    """Specials, all bytes, and every beginning and end of some words, with scores in an order of their own."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [KINDS.UNKNOWN, KINDS.CONTROL, KINDS.CONTROL, *[KINDS.BYTE] * 256]
    parts = {SPACE, *"abcdefghijklmnopqrstuvwxyz"}
    for word in WORDS:
        for end in range(2, len(word) + 1):
            parts |= {word[:end], word[-end:], SPACE + word[:end]}
    draw = random.Random(0)
    ordered = sorted(parts)
    draw.shuffle(ordered)
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(ordered))]
    return [*tokens, *ordered], [*kinds, *[KINDS.NORMAL] * len(ordered)], scores


def by_scores(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """What SentencePiece's BPE says: of neighbours that are a token together, those of the best score merge first."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        together = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not together:
            break
        at = -max(together)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def test_pieces_merge_by_their_scores(tmp_path: Path) -> None:
    tokens, kinds, scores = pieces()
    tokenizer = written(
        tmp_path / "a.gguf", "llama", tokens, kinds, scores=scores, bos_token_id=1, eos_token_id=2, unknown_token_id=0
    )
    draw = random.Random(1)
    for _ in range(200):
        text = " ".join(draw.choice([*WORDS, "xyzzy", "Ünï 語", "to\nto"]) for _ in range(draw.randint(1, 8)))
        ids = tokenizer.encode(text)
        assert ids == [1, *by_scores(text, tokens, scores)]
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a</s>") == [1, *by_scores("a", tokens, scores), 2]


def test_what_stands_around_texts(tmp_path: Path) -> None:
    tokens, kinds, scores = pieces()
    tokenizer = written(
        tmp_path / "a.gguf",
        "llama",
        tokens,
        kinds,
        scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        add_bos_token=False,
        add_eos_token=True,
        add_space_prefix=False,
    )
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    assert tokenizer.encode("the") == [ids["the"], 2]
    assert tokenizer.decode([ids["the"], ids[SPACE + "the"]]) == "the the"


def byte_level(path: Path, pre: str, **metadata: object) -> Tokenizer:
    alphabet = [
        chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))
    ]
    tokens = [*alphabet, "ab", "abc", "bc", "<|end|>", "[PAD260]"]
    kinds = [*[KINDS.NORMAL] * (len(tokens) - 2), KINDS.CONTROL, KINDS.UNUSED]
    merges = ["b c", "a b", "a bc", "x y"]
    return written(path, "gpt2", tokens, kinds, pre=pre, merges=merges, eos_token_id=len(tokens) - 2, **metadata)


# A text with what the patterns differ in, and the pieces into which it is cut.
TEXT = "I'll pay 1234 EURos, don'T\n\n  wait!"
SPLITS = {
    "gpt-2": ["I", "'ll", " pay", " 1234", " EURos", ",", " don", "'", "T", "\n\n ", " wait", "!"],
    "llama-bpe": ["I", "'ll", " pay", " ", "123", "4", " EURos", ",", " don", "'T", "\n\n", " ", " wait", "!"],
    "qwen2": ["I", "'ll", " pay", " ", *"1234", " EURos", ",", " don", "'T", "\n\n", " ", " wait", "!"],
    "tekken": ["I", "'ll", " pay", " ", *"1234", " EURos", ",", " don", "'T", "\n\n", " ", " wait", "!"],
    "gpt-4o": ["I'll", " pay", " ", "123", "4", " EURos", ",", " don'T", "\n\n", " ", " wait", "!"],
    "kimi-k2": ["I'll", " pay", " ", "123", "4", " EURos", ",", " don'T", "\n\n", " ", " wait", "!"],
    "deepseek-llm": [
        *("I", "'", "ll", " pay", " ", "1234", " EURos", ",", " don", "'", "T", "\n", "\n", " ", " wait", "!")
    ],
    "smollm": ["I", "'ll", " pay", " ", *"1234", " EURos", ",", " don", "'", "T", "\n\n ", " wait", "!"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_texts_are_split_as_the_vocabulary_was_learned(tmp_path: Path, pre: str) -> None:
    tokenizer = byte_level(tmp_path / "a.gguf", pre, add_bos_token=False)
    found = tokenizer._tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in found] == SPLITS[pre]


@pytest.mark.parametrize(
    "pre",
    [
        "default",
        "falcon",
        "bloom",
        "deepseek-coder",
        "deepseek-llm",
        "deepseek-v3",
        "kimi-k2",
        "seed-coder",
        "bailingmoe",
        "qwen35",
    ],
)
def test_every_pattern_keeps_the_whole_text(tmp_path: Path, pre: str) -> None:
    tokenizer = byte_level(tmp_path / "a.gguf", pre)
    for text in (TEXT, "數 語 ひらがな 12,345\r\n\t- done.", "été à la plage  \n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_and_whole_words(tmp_path: Path) -> None:
    """By their ranks, unless the vocabulary is asked for whole words first; what fills it up is no token."""
    by_rank = byte_level(tmp_path / "a.gguf", "qwen2")
    names = [by_rank.id_to_token(token_id) for token_id in by_rank.encode("ab abc<|end|>")]
    assert names == ["ab", "\u0120", "abc", "<|end|>"]
    assert by_rank.token_to_id("[PAD260]") is None
    assert by_rank.eos_token_ids == {by_rank.token_to_id("<|end|>")}
    whole = byte_level(tmp_path / "b.gguf", "llama-bpe", bos_token_id=0)
    assert [whole.id_to_token(token_id) for token_id in whole.encode("abc")] == ["!", "abc"]


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.pre 'strange' is not known"):
        byte_level(tmp_path / "a.gguf", "strange")
    tokens, kinds, scores = pieces()
    with pytest.raises(UnsupportedError, match="of the kind 'rwkv': gpt2, llama, bert, t5 are"):
        written(tmp_path / "b.gguf", "rwkv", tokens, kinds)
    with pytest.raises(InvalidArgumentError, match="scores must have a number for each token"):
        written(tmp_path / "c.gguf", "llama", tokens, kinds, scores=scores[1:])
    with pytest.raises(InvalidArgumentError, match=r"token_type has 10 entries for \d+ tokens"):
        written(tmp_path / "d.gguf", "llama", tokens, kinds[:10], scores=scores)
    with pytest.raises(InvalidArgumentError, match="begin or end with the token 99999"):
        written(tmp_path / "e.gguf", "llama", tokens, kinds, scores=scores, bos_token_id=99999)
