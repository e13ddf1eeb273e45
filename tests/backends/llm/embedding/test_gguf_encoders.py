"""Encoders in GGUF files against the checkpoints in safetensors that they were made from."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from modelserver_backends.llm.checkpoint import open_checkpoint
from modelserver_backends.llm.embedding.recognition import is_encoder, purpose_of
from modelserver_backends.llm.options import EngineOptions
from modelserver_backends.llm.text.tokenizer import Tokenizer
from support.checkpoints import encoder_of
from support.gguf_encoders import ENCODER_ARCHITECTURES, write_encoder_gguf
from support.gguf_models import QuantizationType
from support.tiny_encoders import SIZE, VOCAB_SIZE, reference_hidden, write_encoder

from modelserver.errors import InvalidArgumentError, UnsupportedError
from modelserver.toolkit.language_models import convert_language_model

OPTIONS = EngineOptions(device="cpu", dtype="float32", num_threads=1)
KINDS = gguf.TokenType
TEXT = "The model answers, It waits: every Réquest 数 of 12 servers??"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of an encoder of a family."""

    @cache
    def written(family: str) -> Path:
        return write_encoder(tmp_path_factory.mktemp("sources") / family, family)

    return written


def texts(seed: int) -> list[list[int]]:
    drawn = np.random.default_rng(seed)
    return [drawn.integers(4, VOCAB_SIZE, length).tolist() for length in (9, 1, 33, 17)]


@pytest.mark.parametrize("family", ENCODER_ARCHITECTURES)
def test_vectors_are_those_of_the_safetensors(family: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_encoder_gguf(source(family), tmp_path / "model.gguf", family)
    token_id_lists = texts(len(family))
    with open_checkpoint(path) as checkpoint:
        assert is_encoder(checkpoint.config, checkpoint)
    found, expected = (encoder_of(place, OPTIONS).embed(token_id_lists) for place in (path, source(family)))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_allclose(found[0], reference_hidden(source(family), token_id_lists[0]).mean(axis=0), atol=1e-5)


@pytest.mark.parametrize("family", ["nomic", "modernbert", "jina"])
def test_blocks_are_what_the_package_unpacks(family: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where a matrix of the file is three of the network."""
    path = write_encoder_gguf(source(family), tmp_path / "model.gguf", family, kind=QuantizationType.Q5_1)
    reader = gguf.GGUFReader(path)
    theirs = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    with open_checkpoint(path) as checkpoint:
        ours: dict[str, list[np.ndarray]] = {}
        for name in checkpoint.names():
            stored = f"{checkpoint.module(name.rpartition('.')[0])}.{name.rpartition('.')[2]}"
            ours.setdefault(stored, []).append(checkpoint.tensor(name).numpy())
    assert ours.keys() == theirs.keys()
    for name, parts in ours.items():
        if len(parts) == 3:  # sorted by name: keys, queries, values
            parts = [parts[1], parts[0], parts[2]]
        np.testing.assert_array_equal(np.concatenate(parts), theirs[name])
    near = encoder_of(path, OPTIONS).embed(texts(1))
    for one, other in zip(near, encoder_of(source(family), OPTIONS).embed(texts(1)), strict=True):
        assert 0.95 < one @ other / np.linalg.norm(one) / np.linalg.norm(other) < 0.999999


@pytest.mark.parametrize(
    ("pooling", "way"), [(gguf.PoolingType.CLS, 0), (gguf.PoolingType.LAST, -1), (gguf.PoolingType.MEAN, None)]
)
def test_the_file_says_how_states_become_a_vector(
    pooling: gguf.PoolingType, way: int | None, source: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_encoder_gguf(source("bert"), tmp_path / "model.gguf", "bert", pooling=pooling)
    encoder, token_ids = encoder_of(path, OPTIONS), texts(3)[2]
    hidden = reference_hidden(source("bert"), token_ids)
    expected = hidden.mean(axis=0) if way is None else hidden[way]
    np.testing.assert_allclose(encoder.embed([token_ids])[0], expected, atol=1e-5)
    assert encoder.head.is_normalised
    assert encoder.max_model_len == 64


def test_dense_layers_of_the_file_follow_pooling(source: Callable[[str], Path], tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    first, second = (drawn.normal(size=shape).astype(np.float32) for shape in ((64, SIZE), (SIZE, 64)))
    dense = {"dense_2.weight": first, "dense_3.weight": second}
    path = write_encoder_gguf(source("gemma3"), tmp_path / "model.gguf", "gemma3", dense=dense)
    token_ids = texts(4)[0]
    pooled = reference_hidden(source("gemma3"), token_ids).mean(axis=0)
    np.testing.assert_allclose(
        encoder_of(path, OPTIONS).embed([token_ids])[0], second @ (first @ pooled), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", ["roberta", "nomic", "gemma3"])
def test_it_becomes_a_directory_of_sentence_transformers(
    family: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    drawn = np.random.default_rng(1)
    dense = {"dense_2.weight": drawn.normal(size=(16, SIZE)).astype(np.float32)} if family == "gemma3" else None
    path = write_encoder_gguf(source(family), tmp_path / "a.gguf", family, pooling=gguf.PoolingType.CLS, dense=dense)
    convert_language_model(str(path), tmp_path / "models" / "one", "safetensors", lambda _step: None)
    found, expected = (encoder_of(place, OPTIONS) for place in (tmp_path / "models" / "one" / "1", path))
    for one, other in zip(found.embed(texts(5)), expected.embed(texts(5)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert found.tokenizer.encode(TEXT) == expected.tokenizer.encode(TEXT)


def test_a_classifier_is_refused(source: Callable[[str], Path], tmp_path: Path) -> None:
    path = write_encoder_gguf(source("bert"), tmp_path / "model.gguf", "bert", pooling=gguf.PoolingType.RANK)
    with open_checkpoint(path) as checkpoint, pytest.raises(UnsupportedError, match="which classifies"):
        purpose_of(checkpoint.config, checkpoint)


def test_word_pieces_are_those_of_the_vocabulary(source: Callable[[str], Path], tmp_path: Path) -> None:
    with open_checkpoint(source("bert")) as checkpoint:
        expected = Tokenizer.from_checkpoint(checkpoint)
    with open_checkpoint(write_encoder_gguf(source("bert"), tmp_path / "model.gguf", "bert")) as checkpoint:
        found = Tokenizer.from_checkpoint(checkpoint)
    assert found.pad_token_id == expected.pad_token_id == 1
    assert found.special_ids == expected.special_ids
    for text in (TEXT, "[CLS] the\tmodel [SEP]\n", "", "zzz ünd \u200b straße 語語", "the" * 80):
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))


@pytest.mark.parametrize(("flags", "is_lowercase"), [({}, False), ({"normalizer.lowercase": True}, True)])
def test_a_vocabulary_with_capitals_keeps_them(tmp_path: Path, flags: dict[str, bool], is_lowercase: bool) -> None:
    """Unless the file says otherwise."""
    tokens = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "\u2581The", "\u2581the", "m"]
    writer_kinds = [KINDS.CONTROL] * 4 + [KINDS.NORMAL] * 3
    tokenizer = {"model": "bert", "tokens": tokens, "token_type": writer_kinds, "unknown_token_id": 3}
    tokenizer |= {"cls_token_id": 0, "seperator_token_id": 2, **flags}
    directory = write_encoder(tmp_path / "source")
    path = write_encoder_gguf(directory, tmp_path / "model.gguf", "bert", tokenizer=tokenizer)
    with open_checkpoint(path) as checkpoint:
        found = Tokenizer.from_checkpoint(checkpoint)
    assert found.encode("The them") == [0, 5 if is_lowercase else 4, 5, 6, 2]


def _charsmap() -> bytes:
    """A table of SentencePiece that makes Q a q: a double array with one key, then what it stands for."""
    units = [0] * 0x100
    units[0x51] = 0x51 | 1 << 8 | 1 << 10
    units[0x50] = 1 << 31
    trie = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(trie)) + trie + b"q\0"


def test_likeliest_pieces_are_those_of_the_library(source: Callable[[str], Path], tmp_path: Path) -> None:
    """XLM-RoBERTa's tokenizer, also in a file without a charsmap and flags."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -3.0)]
    pieces += [(f"\u2581{word}", -4.0 - at) for at, word in enumerate(("the", "quick", "server", "ser", "q"))]
    pieces += [(piece, -5.0 - at / 7) for at, piece in enumerate(("ver", "er", *"abcdefghijklmnopqrstuvwxyz,."))]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 3, False))
    library.normalizer = tokenizers.normalizers.Precompiled(_charsmap())
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Metaspace()]
    )
    library.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    kinds = [KINDS.CONTROL, KINDS.CONTROL, KINDS.CONTROL, KINDS.UNKNOWN] + [KINDS.NORMAL] * (len(pieces) - 4)
    metadata = {
        "model": "t5",
        "tokens": [piece for piece, _ in pieces],
        "scores": [score for _, score in pieces],
        "token_type": kinds,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "padding_token_id": 1,
    }
    full = {**metadata, "add_bos_token": True, "add_eos_token": True, "remove_extra_whitespaces": True}
    full |= {"add_space_prefix": True, "precompiled_charsmap": _charsmap()}
    path = write_encoder_gguf(source("xlm_roberta"), tmp_path / "a.gguf", "xlm_roberta", tokenizer=full)
    with open_checkpoint(path) as checkpoint:
        found = Tokenizer.from_checkpoint(checkpoint)
    for text in ("the Quick  server, 7 ünits\n qqq ", "Q", "   ", "</s> verserver"):
        assert found.encode(text) == [0, *library.encode(text).ids, 2]
    assert found.decode(found.encode("the quick server")) == "the quick server"
    path = write_encoder_gguf(source("xlm_roberta"), tmp_path / "b.gguf", "xlm_roberta", tokenizer=metadata)
    with open_checkpoint(path) as checkpoint:
        plain = Tokenizer.from_checkpoint(checkpoint)
    assert plain.encode("the quick") == [*library.encode("the quick").ids, 2]
    for damaged in (_charsmap()[:-1], _charsmap()[:99], b"\xff" * 200, _charsmap()[:4] + bytes([0, 0xFF] * 600)):
        full["precompiled_charsmap"] = damaged
        path = write_encoder_gguf(source("xlm_roberta"), tmp_path / "c.gguf", "xlm_roberta", tokenizer=full)
        with open_checkpoint(path) as checkpoint, pytest.raises(InvalidArgumentError, match="is damaged"):
            Tokenizer.from_checkpoint(checkpoint)
