"""Weights in 8 bits, and the seam for other ways to store them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from modelserver_backends.llm.quantization import find_scheme, online
from modelserver_backends.llm.quantization.online import Fp8, Int4, Int8, OnlineScheme, in_8_bits
from safetensors.torch import load_file, save_file
from support.generations import generate, loaded_engine
from support.tiny_checkpoints import reference_logprobs

from modelserver.backend import UnsupportedError


@pytest.mark.parametrize(("scheme", "most"), [(Int8(), 0.02), (Int4(), 0.1), (Fp8(), 0.05)])
@pytest.mark.parametrize("inputs", [64, 256, 100])
def test_online_schemes_are_close_to_the_floats_they_are_made_of(
    scheme: OnlineScheme, most: float, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, inputs, generator=generator)
    weight[3] = 0.0
    weight[4] *= 1e-6
    rounded = scheme.rounded(weight).dequantized()
    assert (rounded - weight).norm() < most * weight.norm()
    assert rounded[3].count_nonzero() == 0
    assert (rounded[4] - weight[4]).norm() < 2 * most * weight[4].norm()


@pytest.mark.parametrize("scheme", [Int8(), Int4(), Fp8()], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_an_engine_in_few_bits_says_what_the_rounded_floats_say(
    family: str,
    scheme: OnlineScheme,
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A matrix is rounded in several parts, as large ones are."""
    monkeypatch.setattr(online, "_VALUES_AT_ONCE", 1000)
    directory, twin, prompt = checkpoint(family), tmp_path / "twin", list(range(20, 40))
    shutil.copytree(directory, twin)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            rounded = in_8_bits(tensor.float()) if "embed_tokens" in name else scheme.rounded(tensor.float())
            tensors[name] = rounded.dequantized()
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    with loaded_engine(directory, quantization=scheme.name) as engine:
        tokens, logprobs = generate(engine, [prompt], 8)[0]
    exact = reference_logprobs(twin, prompt + tokens)[len(prompt) - 1 : -1]
    assert logprobs == pytest.approx([float(row[token]) for row, token in zip(exact, tokens, strict=True)], abs=0.3)


@pytest.mark.parametrize(
    ("asked", "stored", "message"),
    [
        ("int3", None, "quantization 'int3' is not supported; on plain weights there is: int8, int4, fp8"),
        (None, "hqq", "quantization 'hqq' is not supported"),
        ("int8", "awq", "'int8' was asked for, but the checkpoint's weights are 'awq'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(asked: str | None, stored: str | None, message: str) -> None:
    config = {} if stored is None else {"quantization_config": {"quant_method": stored}}
    with pytest.raises(UnsupportedError, match=message):
        find_scheme(asked, config)
