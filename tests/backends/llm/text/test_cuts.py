"""Where long texts are cut, and that it changes none of their tokens."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import tokenizers
from modelserver_backends.llm.text.cuts import find_cuts, max_token_bytes
from modelserver_backends.llm.text.tokenizer import LONG_TEXT, Tokenizer
from support.tiny_tokenizers import TEXTS, byte_fallback, byte_level
from tokenizers import models, normalizers, pre_tokenizers, trainers

from modelserver.errors import InvalidArgumentError

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALPHABET = [
    *"ab Zß9,.;:(\"\n\t é文。\uff0c'-_<\u0301\r\U0001f600\u0660Ⅷ²",
    "  ",
    "</s>",
    "<tool call>",
    "don't",
    " the",
]


def split_by(pattern: str) -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def composed() -> tokenizers.Tokenizer:
    tokenizer = split_by(CL100K)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def sentencepiece(*steps: Any) -> tokenizers.Tokenizer:
    """Trained as SentencePiece does by default: no token lies across the beginning of a word."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    special = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, limit_alphabet=70, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    document = described(tokenizer)
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] == "<unk>"]
    document["pre_tokenizer"] = None
    made = tokenizers.Tokenizer.from_str(orjson.dumps(document).decode())
    if steps:
        made.normalizer = normalizers.Sequence(list(steps))
    return made


def metaspace(tokenizer: tokenizers.Tokenizer, scheme: str) -> tokenizers.Tokenizer:
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    return tokenizer


TOKENIZERS = {
    "GPT-2": byte_level,
    "cl100k": lambda: split_by(CL100K),
    "o200k": lambda: split_by(O200K),
    "NFC": composed,
    "Llama 2": lambda: sentencepiece(normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")),
    "Gemma": lambda: byte_fallback(is_stripped=False),
    "Metaspace": lambda: metaspace(byte_fallback(is_stripped=False), "always"),
    "unsplit Metaspace": lambda: metaspace(sentencepiece(), "first"),
}


def described(tokenizer: tokenizers.Tokenizer) -> Any:
    return orjson.loads(tokenizer.to_str())


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_parts_have_the_tokens_of_the_whole(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    cuts = find_cuts(described(tokenizer))
    assert cuts is not None
    chosen = random.Random(7)
    num_parts = 0
    for _ in range(400):
        text = "".join(chosen.choices(ALPHABET, k=chosen.randint(1, 200)))
        parts = list(cuts.split(text, chosen.randint(1, 9), len(text)))
        num_parts += len(parts) - 1
        ids = [token_id for part in parts for token_id in tokenizer.encode(part, add_special_tokens=False).ids]
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids, text
    assert num_parts > 400


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_long_texts_are_read_as_the_library_reads_them(kind: str) -> None:
    theirs = TOKENIZERS[kind]()
    ours = Tokenizer(tokenizers.Tokenizer.from_str(theirs.to_str()))
    text = " ".join(TEXTS * 400)
    assert len(text) > 20 * LONG_TEXT
    told: list[int] = []
    assert ours.encode(text, check_length=lambda count, _: told.append(count)) == theirs.encode(text).ids
    assert told[1:] == sorted(told[1:])  # the first is an estimate by the text's size
    assert told[0] < told[-1]
    assert len(told) > 5
    assert ours.encode(text, longest=300) == theirs.encode(text).ids[:300]


@pytest.mark.parametrize(
    "pattern",
    [
        r"\w+ \w+",
        r"(?:\p{L}+ ?)+",
        r"\p{L}+(?= )",
        r".+",
        r"(?<=a)\s",
        r"\p{L}+[ ,]",
        r"[^x]+",
        r"\bx",
        r"(?:\p{N}|\s)+",
        "(",
    ],
)
def test_what_may_reach_across_a_space_is_not_cut_there(pattern: str) -> None:
    document = described(byte_level())
    document["added_tokens"] = []
    document["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    cuts = find_cuts(document)
    assert cuts is None or " " not in cuts.separators


def test_tokens_may_reach_across() -> None:
    document = described(sentencepiece(normalizers.Replace(" ", "▁")))
    cuts = find_cuts(document)
    assert cuts is not None
    assert {" ", ","} <= set(cuts.separators)
    document["model"]["vocab"]["a▁b"] = 9999
    document["added_tokens"].append({"content": "<x,y>", "rstrip": False, "lstrip": False})
    fewer = find_cuts(document)
    assert fewer is not None
    assert set(cuts.separators) - set(fewer.separators) == {" ", ","}
    document["added_tokens"].append({"content": "word", "rstrip": True, "lstrip": False})
    assert find_cuts(document) is None
    document["normalizer"] = {"type": "Nmt"}
    assert find_cuts(document) is None


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_token_stands_for_more_than_is_said(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    most = max_token_bytes(described(tokenizer))
    if most is None:
        return
    chosen = random.Random(9)
    for _ in range(300):
        text = "".join(chosen.choices([*ALPHABET, *TEXTS], k=chosen.randint(1, 60)))
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) >= len(text) // most


def test_tokens_that_swallow_spaces_have_no_longest() -> None:
    tokenizer = byte_level()
    assert max_token_bytes(described(tokenizer)) is not None
    tokenizer.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    assert max_token_bytes(described(tokenizer)) is None


MEASURED = """
import resource, sys
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.text.tokenizer import Tokenizer
from pathlib import Path
tokenizer = Tokenizer.from_checkpoint(open_checkpoint(Path(sys.argv[1])))
tokenizer.encode("words " * 4000)
text = "What does the function say, when it is called? " * 85_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokens = tokenizer.encode_array(text)
assert len(tokens) > 500_000
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / len(text))
"""


def test_a_long_text_takes_a_few_times_its_size() -> None:
    checkpoint = Path(__file__).parents[4] / "model_repository" / "tiny_chat" / "1"
    command = [sys.executable, "-c", MEASURED, str(checkpoint)]
    measured = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert float(measured.stdout) < 20


def test_a_text_that_cannot_be_cut_is_refused_before_it_takes_memory() -> None:
    cuts = find_cuts(described(byte_level()))
    assert cuts is not None
    parts = cuts.split("word," * 100 + "a" * 5000, 10, 1000)
    with pytest.raises(InvalidArgumentError, match="more than 1000 characters in which it cannot be cut"):
        list(parts)
    assert "".join(cuts.split("word," * 100 + "a" * 900, 10, 1000)) == "word," * 100 + "a" * 900
