"""Every form of a linear layer computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from modelserver_backends.llm.models import linear as linear_module
from modelserver_backends.llm.models.linear import (
    PackedLinear,
    PlainLinear,
    SmallLinear,
    SummedLinear,
    can_pack,
    float_linear,
    packed_embedding,
)


@pytest.mark.parametrize(
    ("inputs", "outputs", "kind"), [(16, 24, PlainLinear), (200, 300, SmallLinear), (512, 400, PackedLinear)]
)
@pytest.mark.parametrize("rows", [1, 8, 9, 70])
@pytest.mark.parametrize("has_bias", [False, True])
def test_forms(inputs: int, outputs: int, kind: type, rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    values, residual = torch.randn(rows, inputs, generator=generator), torch.randn(rows, outputs, generator=generator)
    linear = float_linear(weight, bias)
    assert isinstance(linear, kind)
    expected = functional.linear(values, weight, bias)
    torch.testing.assert_close(linear(values, None), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(linear.add_to(residual.clone(), values, None), residual + expected, atol=1e-4, rtol=1e-4)
    doubled = SummedLinear(linear, lambda part: part.mul_(2))
    torch.testing.assert_close(
        doubled.add_to(residual.clone(), values, None), residual + 2 * expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(1000, 260), (1001, 259), (640, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_embedding_is_read_from_the_memory_of_its_head(
    vocab_size: int, hidden_size: int, dtype: torch.dtype
) -> None:
    """Rows and columns that fill the last block up are not seen."""
    weight = torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    embedding = packed_embedding(weight)
    assert (embedding is None) == (not can_pack(dtype))
    if embedding is not None:
        token_ids = torch.tensor([vocab_size - 1, 0, 63, 64, 65, 511, 512, vocab_size - 1])
        assert torch.equal(embedding(token_ids), weight[token_ids])
        assert embedding.num_bytes == weight.nbytes
        rows = embedding(torch.arange(40))
        assert torch.equal(embedding.head()(rows, None), PackedLinear(weight, None)(rows, None))


def test_an_order_that_is_not_known_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_BLOCK_OUTPUTS", (24,))
    assert packed_embedding(torch.randn(1000, 260)) is None
    assert packed_embedding(torch.randn(8, 16)) is None  # which BLAS multiplies
