"""Weights in 8 bits, and the seam for other ways to store them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional
from modelserver_backends.llm.quantization import find_scheme
from modelserver_backends.llm.quantization.int8 import Int8Linear
from support.generations import generate, loaded_engine
from support.tiny_checkpoints import reference_logprobs

from modelserver.backend import UnsupportedError


@pytest.mark.parametrize("rows", [1, 7, 100])  # below and above where the weight is expanded
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_is_close_to_the_floats_it_was_made_of(rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    bias = torch.randn(48, generator=generator) if has_bias else None
    values, residual = torch.randn(rows, 64, generator=generator), torch.randn(rows, 48, generator=generator)
    linear = Int8Linear(weight, bias)
    exact = functional.linear(values, weight, bias)
    assert linear.weight.dtype == torch.int8
    assert (linear(values, None) - exact).norm() < 0.02 * exact.norm()
    torch.testing.assert_close(linear.add_to(residual.clone(), values, None), residual + linear(values, None))


def test_an_engine_in_int8_says_nearly_the_same(checkpoint: Callable[[str], Path]) -> None:
    directory, prompt = checkpoint("llama"), list(range(20, 40))
    with loaded_engine(directory, quantization="int8") as engine:
        tokens, logprobs = generate(engine, [prompt], 8)[0]
    exact = reference_logprobs(directory, prompt + tokens)[len(prompt) - 1 : -1]
    assert logprobs == pytest.approx([float(row[token]) for row, token in zip(exact, tokens, strict=True)], abs=0.3)


@pytest.mark.parametrize(
    ("asked", "stored", "message"),
    [
        ("int3", None, "quantization 'int3' is not supported; on plain weights there is: int8"),
        (None, "hqq", "quantization 'hqq' is not supported"),
        ("int8", "awq", "'int8' was asked for, but the checkpoint's weights are 'awq'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(asked: str | None, stored: str | None, message: str) -> None:
    config = {} if stored is None else {"quantization_config": {"quant_method": stored}}
    with pytest.raises(UnsupportedError, match=message):
        find_scheme(asked, config)
