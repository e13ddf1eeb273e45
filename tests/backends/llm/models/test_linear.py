"""Every form of a linear layer computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from modelserver_backends.llm.models.linear import PackedLinear, PlainLinear, SmallLinear, SummedLinear, float_linear


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
