"""The neutral description of a quantized matrix: what it stands for, and how it is cut and joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from modelserver_backends.llm.extend import QuantizedWeight, quantized_embedding, quantized_linear

from modelserver.backend import InvalidArgumentError, UnsupportedError

OUTPUTS, INPUTS = 12, 512


def made(kind: str, outputs: int = OUTPUTS, inputs: int = INPUTS, seed: int = 0) -> QuantizedWeight:
    """A random weight in the manner of a format."""
    generator = torch.Generator().manual_seed(seed)

    def codes(most: int) -> torch.Tensor:
        return torch.randint(0, most + 1, (outputs, inputs), generator=generator, dtype=torch.uint8)

    def floats(group: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return (torch.rand(outputs, -(-inputs // group), generator=generator) * 0.02 + 0.001).to(dtype)

    def integers(group: int, most: int) -> torch.Tensor:
        return torch.randint(0, most + 1, (outputs, inputs // group), generator=generator, dtype=torch.uint8)

    table = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
    parts: dict[str, Any]
    match kind:
        case "symmetric 4":
            parts = {"codes": codes(15), "scales": floats(32), "zeros": torch.full((outputs, inputs // 32), 8)}
            parts |= {"zeros": parts["zeros"].to(torch.uint8), "group": 32, "bits": 4}
        case "zeros 4":
            parts = {"codes": codes(15), "scales": floats(128), "zeros": integers(128, 16), "group": 128, "bits": 4}
            parts["order"] = torch.randperm(inputs, generator=generator)
        case "mins 5":
            parts = {"codes": codes(31), "scales": floats(32), "mins": floats(32), "group": 32, "bits": 5}
        case "zeros 6":
            scales = (integers(16, 255).int() - 128).to(torch.int8)
            parts = {"codes": codes(63), "scales": scales, "scale_factors": floats(256), "group": 16, "bits": 6}
            parts["zeros"] = torch.full((outputs, inputs // 16), 32, dtype=torch.uint8)
        case "scales of scales 4":
            parts = {"codes": codes(15), "scales": integers(32, 63), "mins": integers(32, 63), "group": 32, "bits": 4}
            parts |= {"scale_factors": floats(256), "min_factors": floats(256)}
        case "signed 8":
            signed = (codes(255).int() - 128).to(torch.int8)
            scales = (integers(16, 255).int() - 128).to(torch.int8)
            parts = {"codes": signed, "scales": scales, "scale_factors": floats(256), "group": 16, "bits": 8}
        case "table 4":
            parts = {"codes": codes(15), "scales": floats(32, torch.float32), "table": table, "group": 32, "bits": 4}
        case "rows 8":
            parts = {"codes": codes(254), "scales": floats(inputs, torch.float32), "group": inputs, "bits": 8}
            parts["zeros"] = integers(inputs, 255)
        case _:
            codes_8 = codes(255) & 0xBF  # without what is no number
            parts = {"codes": codes_8.view(torch.float8_e4m3fn), "scales": floats(128), "group": 128, "bits": 8}
    return QuantizedWeight(**parts)


KINDS = [
    "symmetric 4",
    "zeros 4",
    "mins 5",
    "zeros 6",
    "scales of scales 4",
    "signed 8",
    "table 4",
    "rows 8",
    "float 8",
]


def by_hand(weight: QuantizedWeight) -> np.ndarray:
    """Element by element, in numpy's float32."""

    def grid(tensor: torch.Tensor | None, factors: torch.Tensor | None = None) -> np.ndarray:
        if tensor is None:
            return np.zeros((weight.num_outputs, weight.num_inputs), np.float32)
        values = tensor.float().numpy()
        if factors is not None:
            values = values * np.repeat(factors.float().numpy(), values.shape[1] // factors.shape[1], axis=1)
        return np.repeat(values, weight.group, axis=1)[:, : weight.num_inputs]

    codes = weight.codes.float().numpy()
    if weight.table is not None:
        codes = weight.table.numpy()[codes.astype(int)].astype(np.float32)
    found = (codes - grid(weight.zeros)) * grid(weight.scales, weight.scale_factors)
    found = found - grid(weight.mins, weight.min_factors)
    if weight.order is None:
        return found
    ordered = np.empty_like(found)
    ordered[:, weight.order.numpy()] = found
    return ordered


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_stands_for(kind: str) -> None:
    weight = made(kind)
    assert np.array_equal(weight.dequantized().numpy(), by_hand(weight))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_inputs_are_those_of_the_whole(kind: str) -> None:
    weight = made(kind)
    whole = weight.dequantized()
    assert torch.equal(weight.rows(slice(3, 7)).dequantized(), whole[3:7])
    chosen = torch.tensor([5, 0, 5])
    assert torch.equal(weight.rows(chosen).dequantized(), whole[chosen])
    if weight.order is not None:
        with pytest.raises(UnsupportedError, match="sorted by group"):
            weight.inputs(0, 256)
    elif weight.group < INPUTS:
        assert torch.equal(weight.inputs(256, 512).dequantized(), whole[:, 256:])
        with pytest.raises(InvalidArgumentError, match="not whole groups"):
            weight.inputs(0, 8)
    if weight.scale_factors is not None:
        with pytest.raises(InvalidArgumentError, match="cut what"):
            weight.inputs(128, 512)


def test_those_that_are_alike_are_joined() -> None:
    first, second = made("mins 5"), made("mins 5", outputs=5, seed=1)
    joined = QuantizedWeight.joined([first, second])
    assert torch.equal(joined.dequantized(), torch.cat([first.dequantized(), second.dequantized()]))
    for other in KINDS:
        assert first.is_like(made(other)) == (other == "mins 5")
    with pytest.raises(InvalidArgumentError, match="different formats"):
        QuantizedWeight.joined([first, made("zeros 4")])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_multiply_by_it(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [made(kind), made("signed 8", outputs=20), made("signed 8", outputs=8, seed=3)]
    bias = torch.randn(40, generator=generator)
    rows = torch.randn(3, INPUTS, generator=generator).to(dtype)
    residual = torch.randn(3, 40, generator=generator).to(dtype)
    linear = quantized_linear(parts, bias)
    found = linear(rows, None)
    exact = functional.linear(rows.float(), torch.cat([part.dequantized() for part in parts]), bias)
    assert found.dtype is dtype
    assert (found.float() - exact).norm() < 0.01 * exact.norm()
    added = linear.add_to(residual.clone(), rows, None)
    assert (added.float() - (residual.float() + exact)).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_has_the_rows_that_are_asked_for(kind: str) -> None:
    weight, token_ids = made(kind, inputs=256), torch.tensor([3, 3, 11, 0])
    found = quantized_embedding(weight, torch.float32)(token_ids)
    assert torch.equal(found, weight.dequantized()[token_ids])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codes": torch.zeros(4, dtype=torch.uint8)}, "codes"),
        ({"codes": torch.zeros(4, 64)}, "codes"),
        ({"scales": torch.ones(4, 3)}, "scales"),
        ({"zeros": torch.ones(4, 2)}, "zeros"),
        ({"mins": torch.ones(4, 1)}, "mins"),
        ({"scale_factors": torch.ones(4, 3)}, "scale_factors"),
        ({"min_factors": torch.ones(4, 1)}, "min_factors"),
        ({"table": torch.zeros(15, dtype=torch.int8)}, "table"),
        ({"order": torch.arange(3)}, "order"),
        ({"bits": 9}, "9 bits"),
        ({"group": 0}, "groups of 0"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changed: dict[str, Any], message: str) -> None:
    parts = {"codes": torch.zeros(4, 64, dtype=torch.uint8), "scales": torch.ones(4, 2), "group": 32, "bits": 4}
    QuantizedWeight(**parts)
    with pytest.raises(InvalidArgumentError, match=message):
        QuantizedWeight(**(parts | changed))
