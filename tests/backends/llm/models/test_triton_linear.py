"""The products by weights in few bits on a GPU: what is packed for them, and their kernels in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from modelserver_backends.llm.quantization.quantized_linear import pack_for_device
from modelserver_backends.llm.quantization.quantized_weight import QuantizedWeight
from support.described_weights import FORMS, described_weight

ROOT = Path(__file__).resolve().parents[4]
CASES = Path(__file__).with_name("triton_linear_cases.py")


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_matrix_stands_for_exactly_the_described_weights(form: str) -> None:
    weight = described_weight(form, 24, 512)
    matrix = pack_for_device(weight, num_processors=1)
    assert matrix is not None
    expected = weight.dequantized() if weight.order is None else weight.dequantized()[:, weight.order]
    torch.testing.assert_close(matrix.dequantized(), expected, atol=0, rtol=0)
    token_ids = torch.tensor([3, 20])
    torch.testing.assert_close(matrix.dequantized(token_ids), expected[token_ids], atol=0, rtol=0)


@pytest.mark.parametrize(("form", "most_bits"), [("w4", 4.25), ("k-quant", 4.75), ("e2m1 of 16", 5.1), ("w8", 8.25)])
def test_a_packed_matrix_takes_as_many_bits_as_its_format(form: str, most_bits: float) -> None:
    matrix = pack_for_device(described_weight(form, 64, 1024), num_processors=1)
    assert matrix is not None
    assert matrix.num_bytes * 8 / (64 * 1024) < most_bits


def test_weights_that_the_kernels_do_not_know_are_not_packed() -> None:
    codes = torch.zeros(4, 96, dtype=torch.uint8)
    assert pack_for_device(QuantizedWeight(codes=codes, scales=torch.ones(4, 4), group=24, bits=4), 1) is None
    no_number = torch.full((4, 16), float("nan")).to(torch.float8_e4m3fn)
    assert pack_for_device(QuantizedWeight(codes=no_number, scales=torch.ones(4, 1), group=16, bits=8), 1) is None


@pytest.mark.tool("triton")
@pytest.mark.parametrize("case", ["experts", "few_rows", "half_precision", "rows_alike", "expanded", "rounded_rows"])
def test_kernels_in_the_interpreter_equal_their_twins(case: str) -> None:
    """In a process of its own: Triton asks for its interpreter when kernels are defined."""
    ended = subprocess.run(
        [sys.executable, str(CASES), case],
        env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join([*sys.path, str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
