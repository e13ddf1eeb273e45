"""Encoders of every family against transformers' own networks, alone and in batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from modelserver_backends.llm.options import EngineOptions
from safetensors.torch import load_file, save_file
from support.checkpoints import encoder_of
from support.tiny_encoders import (
    ENCODER_FAMILIES,
    VOCAB_SIZE,
    reference_hidden,
    write_encoder,
    write_word_tokenizer,
)

from modelserver.errors import InvalidArgumentError, ServerError, UnsupportedError

Encoders = Callable[..., Path]
OPTIONS = EngineOptions(device="cpu", dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Encoders:
    """The directory of an encoder of a family."""

    @cache
    def written(family: str = "bert") -> Path:
        return write_encoder(tmp_path_factory.mktemp("encoders") / family, family)

    return written


def texts(seed: int) -> list[list[int]]:
    drawn = np.random.default_rng(seed)
    return [drawn.integers(4, VOCAB_SIZE, length).tolist() for length in (9, 1, 33, 48, 17)]


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
def test_vectors_are_those_of_transformers_alone_and_in_a_batch(family: str, encoders: Encoders) -> None:
    directory, token_id_lists = encoders(family), texts(len(family))
    encoder = encoder_of(directory, OPTIONS)
    expected = [reference_hidden(directory, token_ids).mean(axis=0) for token_ids in token_id_lists]
    alone = [encoder.embed([token_ids])[0] for token_ids in token_id_lists]
    np.testing.assert_allclose(alone, expected, atol=1e-5)
    np.testing.assert_allclose(encoder.embed(token_id_lists), alone, atol=1e-5)
    np.testing.assert_allclose(encoder.embed(token_id_lists[::-1]), alone[::-1], atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "gemma3", "llama", "modernbert"])
def test_the_first_token_sees_the_last(family: str, encoders: Encoders) -> None:
    encoder = encoder_of(encoders(family), EngineOptions(**_given(pooling="cls")))
    one, other = encoder.embed([[9, 8, 7, 6], [9, 8, 7, 5]])
    assert np.abs(one - other).max() > 1e-3


def _given(**others: Any) -> dict[str, Any]:
    return {"device": "cpu", "dtype": "float32", "num_threads": 1, **others}


@pytest.mark.parametrize("way", ["cls", "max", "last-token", "MEAN"])
def test_options_say_more_than_the_checkpoint(way: str, encoders: Encoders) -> None:
    directory, token_ids = encoders(), texts(1)[2]
    encoder = encoder_of(directory, EngineOptions(**_given(pooling=way, normalize=False, max_model_len=60)))
    hidden = reference_hidden(directory, token_ids)
    expected = {"cls": hidden[0], "max": hidden.max(axis=0), "last-token": hidden[-1], "MEAN": hidden.mean(axis=0)}
    np.testing.assert_allclose(encoder.embed([token_ids])[0], expected[way], atol=1e-5)
    assert (encoder.head.is_normalised, encoder.max_model_len) == (False, 60)


def test_dense_layers_follow_pooling(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "dense", modules=("Pooling", "Dense"), pooling={"pooling_mode": "cls"})
    encoder = encoder_of(directory, OPTIONS)
    layer = load_file(directory / "2_Dense" / "model.safetensors")
    token_id_lists = texts(2)
    for vector, token_ids in zip(encoder.embed(token_id_lists), token_id_lists, strict=True):
        pooled = reference_hidden(directory, token_ids)[0]
        expected = np.tanh(layer["linear.weight"].numpy() @ pooled + layer["linear.bias"].numpy())
        np.testing.assert_allclose(vector, expected, atol=1e-5)
    assert not encoder.head.is_normalised


def test_half_precision_is_near(encoders: Encoders) -> None:
    exact, near = (encoder_of(encoders(), EngineOptions(**_given(dtype=dtype))) for dtype in ("float32", "bfloat16"))
    for one, other in zip(exact.embed(texts(3)), near.embed(texts(3)), strict=True):
        assert other.dtype == np.float32
        assert one @ other > 0.99 * np.linalg.norm(one) * np.linalg.norm(other)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "XLMRobertaForMaskedLM", "DistilBertForMaskedLM"])
def test_a_masked_language_model_is_an_encoder_by_its_means(tmp_path: Path, name: str) -> None:
    """As published before sentence-transformers: other names of tensors, a head, no pooler, no modules.json."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind: Any = getattr(transformers, name)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind(kind.config_class(**sizes, max_position_embeddings=40)).save_pretrained(tmp_path)
    write_word_tokenizer(tmp_path)
    encoder = encoder_of(tmp_path, OPTIONS)
    token_ids = texts(5)[0]
    np.testing.assert_allclose(
        encoder.embed([token_ids])[0], reference_hidden(tmp_path, token_ids).mean(axis=0), atol=1e-5
    )
    assert encoder.head.is_normalised


def _drop(directory: Path, name: str) -> None:
    path = directory / "model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(path).items() if key != name}
    save_file(tensors, path, metadata={"format": "pt"})


def _rewrite(directory: Path, file: str, **entries: Any) -> None:
    described = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps({**described, **entries}))


@pytest.mark.parametrize(
    ("spoil", "options", "kind", "message"),
    [
        (lambda d: _drop(d, "encoder.layer.1.output.dense.bias"), {}, InvalidArgumentError, "lacks 1 of its weights"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x"), {}, InvalidArgumentError, "cannot be read"),
        (
            lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
            {},
            InvalidArgumentError,
            "no safetensors in",
        ),
        (lambda d: (d / "tokenizer.json").unlink(), {}, InvalidArgumentError, "has no tokenizer.json"),
        (
            lambda d: _rewrite(d, "config.json", hidden_size=64),
            {},
            InvalidArgumentError,
            "transformers cannot load the bert",
        ),
        (lambda _: None, {"quantization": "int8"}, UnsupportedError, "which is an encoder"),
        (lambda _: None, {"tensor_parallel_size": 2}, UnsupportedError, "which is an encoder"),
        (lambda _: None, {"max_model_len": 65}, InvalidArgumentError, "more than the 64 positions"),
        (lambda _: None, {"default_prompt_name": "query"}, InvalidArgumentError, "has the prompts none"),
    ],
)
def test_what_cannot_be_served_is_said_at_the_load(
    encoders: Encoders,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    options: dict[str, Any],
    kind: type[ServerError],
    message: str,
) -> None:
    directory = shutil.copytree(encoders(), tmp_path / "spoilt")
    spoil(directory)
    with pytest.raises(kind) as caught:
        encoder_of(directory, EngineOptions(**_given(**options)))
    assert message in caught.value.message


def test_a_pooler_that_is_missing_is_not_missed(encoders: Encoders, tmp_path: Path) -> None:
    directory = shutil.copytree(encoders(), tmp_path / "bert")
    _drop(directory, "pooler.dense.weight")
    vectors = encoder_of(directory, OPTIONS).embed(texts(4))
    np.testing.assert_allclose(vectors, encoder_of(encoders(), OPTIONS).embed(texts(4)), atol=1e-6)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"activation_function": "torch.nn.modules.activation.Mish"}, 'activation_function "Mish"'),
        ({"module_input_name": "token_embeddings"}, "a dense layer of each token"),
    ],
)
def test_dense_layers_that_are_not_known(tmp_path: Path, entries: dict[str, str], message: str) -> None:
    directory = write_encoder(tmp_path / "dense", modules=("Pooling", "Dense"))
    _rewrite(directory, "2_Dense/config.json", **entries)
    with pytest.raises(UnsupportedError) as caught:
        encoder_of(directory, OPTIONS)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "model.safetensors").unlink(), "convert its weights"),
        (lambda d: _drop(d, "linear.weight"), "has no tensor linear.weight"),
        (lambda d: _drop(d, "linear.bias"), "has no tensor linear.bias"),
        (
            lambda d: save_file(
                {
                    "linear.weight": load_file(d / "model.safetensors")["linear.weight"][:, 1:].contiguous(),
                    "linear.bias": load_file(d / "model.safetensors")["linear.bias"],
                },
                d / "model.safetensors",
            ),
            "a dense layer takes vectors of 31 numbers, pooling gives 32",
        ),
    ],
)
def test_dense_layers_that_are_damaged(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    directory = write_encoder(tmp_path / "dense", modules=("Pooling", "Dense"))
    spoil(directory / "2_Dense")
    with pytest.raises(InvalidArgumentError) as caught:
        encoder_of(directory, OPTIONS)
    assert message in caught.value.message
