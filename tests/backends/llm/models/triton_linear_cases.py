"""What test_triton_linear.py runs under TRITON_INTERPRET=1; on a machine with a GPU it runs there without that too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as functional
from modelserver_backends.llm.models import triton_linear
from modelserver_backends.llm.models.device_linear import DeviceEmbedding, DeviceLinear, device_experts
from modelserver_backends.llm.models.device_matrix import DeviceMatrix
from modelserver_backends.llm.models.linear import Linear, PlainLinear
from modelserver_backends.llm.quantization.quantized_linear import pack_for_device
from modelserver_backends.llm.quantization.quantized_weight import QuantizedWeight
from support.described_weights import FORMS, described_weight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def packed(num_outputs: int, num_inputs: int, forms: tuple[str, ...]) -> Iterator[tuple[QuantizedWeight, DeviceMatrix]]:
    for form in forms:
        weight = described_weight(form, num_outputs, num_inputs).to(DEVICE)
        matrix = pack_for_device(weight, num_processors=4)
        assert matrix is not None, form
        yield weight, matrix


def few_rows() -> None:
    """All forms, with and without splits of the inputs, bias and residual."""
    for num_rows, num_outputs, num_inputs in ((1, 40, 256), (17, 33, 1536)):
        for weight, matrix in packed(num_outputs, num_inputs, tuple(FORMS)):
            rows, bias = torch.randn(num_rows, num_inputs, device=DEVICE), torch.randn(num_outputs, device=DEVICE)
            expected = functional.linear(rows, weight.dequantized())
            linear = DeviceLinear(matrix, None)
            torch.testing.assert_close(linear(rows, None), expected, atol=1e-3, rtol=1e-4)
            residual = torch.randn_like(expected)
            added = DeviceLinear(matrix, bias).add_to(residual.clone(), rows, None)
            torch.testing.assert_close(added, residual + expected + bias, atol=1e-3, rtol=1e-4)


def half_precision() -> None:
    """Rows of float16 by weights that are rounded to it, with sums in float32. (The interpreter has no bfloat16.)"""
    for weight, matrix in packed(40, 320, ("w4 zeros", "e2m1 of 16", "float8 of blocks")):
        rows = torch.randn(5, 320, device=DEVICE).half()
        expected = functional.linear(rows.float(), weight.dequantized().half().float())
        found = triton_linear.multiply(matrix, rows, None, None)
        assert found.dtype is torch.float16
        torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=1e-2)


def rows_alike() -> None:
    """A row's result is the same bits, however many rows there are beside it."""
    _, matrix = next(packed(40, 1536, ("w4 zeros",)))
    rows = torch.randn(64, 1536, device=DEVICE)
    every = triton_linear.multiply(matrix, rows, None, None)
    for num_rows in (1, 20):
        assert torch.equal(triton_linear.multiply(matrix, rows[:num_rows], None, None), every[:num_rows])


def expanded() -> None:
    """Exactly what the format says, for the rows of an embedding and for the copy that many rows are multiplied by."""
    for weight, matrix in packed(40, 256, tuple(FORMS)):
        expected = weight.dequantized() if weight.order is None else weight.dequantized()[:, weight.order.long()]
        whole = triton_linear.expand(matrix, slice(3, 37), torch.float32)
        torch.testing.assert_close(whole, expected[3:37], atol=0, rtol=2e-7)
        token_ids = torch.tensor([39, 0, 7, 7], device=DEVICE)
        found = DeviceEmbedding(matrix, torch.float32)(token_ids)
        torch.testing.assert_close(found, expected[token_ids], atol=0, rtol=2e-7)
        rows = torch.randn(65, 256, device=DEVICE)
        many, few = DeviceLinear(matrix, None)(rows, None), DeviceLinear(matrix, None)(rows[:64], None)
        torch.testing.assert_close(many[:64], few, atol=1e-3, rtol=1e-4)


def rounded_rows() -> None:
    """Many rows by weights in 8 bits, both in 8 bits, if the checkpoint was made for that."""
    for form, dtype in (("int8 of outputs", torch.int8), ("float8 of outputs", torch.float8_e4m3fn)):
        rows = torch.randn(70, 256, device=DEVICE)
        weight, matrix = next(packed(48, 256, (form,)))
        scales = rows.abs().amax(dim=1, keepdim=True) / (127 if dtype is torch.int8 else 448)
        if dtype is torch.int8:
            codes = torch.floor(rows / scales + 0.5)
            found_codes, found_scales = triton_linear.round_rows(rows)
            torch.testing.assert_close(found_scales, scales)
            torch.testing.assert_close(found_codes.float(), codes)
        else:
            codes = (rows / scales).to(dtype).float()
        linear = DeviceLinear(matrix, None, dtype)
        expected = functional.linear(codes * scales, weight.dequantized())
        torch.testing.assert_close(linear(rows, None), expected, atol=0.2, rtol=2e-2)
        assert not torch.equal(linear(rows, None), DeviceLinear(matrix, None)(rows, None))


def experts() -> None:
    """Rows sorted by expert, of which some have none and some more than a tile; weights in bits and in floats."""
    counts = torch.tensor([0, 3, 40, 0, 1, 0], device=DEVICE)
    rows = torch.randn(int(counts.sum()), 256, device=DEVICE)
    for form in ("w4 zeros", "e2m1 of 32", "int8 of outputs", "floats"):
        weights = [torch.randn(40, 256, device=DEVICE) for _ in counts]
        biases = None if form == "floats" else [torch.randn(40, device=DEVICE) for _ in counts]
        if biases is None:
            linears: list[Linear] = [PlainLinear(weight, None) for weight in weights]
        else:
            described = [described_weight(form, 40, 256).to(DEVICE) for _ in counts]
            matrices = [pack_for_device(weight, 4) for weight in described]
            linears = [DeviceLinear(matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
            weights = [weight.dequantized() for weight in described]
        grouped = device_experts(linears, 4)
        assert grouped is not None
        expected = torch.cat(
            [
                functional.linear(part, weights[expert], None if biases is None else biases[expert])
                for expert, part in enumerate(rows.split(counts.tolist()))
            ]
        )
        torch.testing.assert_close(grouped(rows, counts, None), expected, atol=1e-3, rtol=1e-4)
    assert device_experts([PlainLinear(weights[0], None), PlainLinear(weights[0][:8], None)], 4) is None


CASES: dict[str, Callable[[], None]] = {
    "experts": experts,
    "few_rows": few_rows,
    "half_precision": half_precision,
    "rows_alike": rows_alike,
    "expanded": expanded,
    "rounded_rows": rounded_rows,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    CASES[sys.argv[1]]()
