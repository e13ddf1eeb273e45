"""Random matrices of every manner in which formats describe them (`QuantizedWeight`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from modelserver_backends.llm.quantization.quantized_weight import QuantizedWeight
from modelserver_backends.llm.quantization.small_floats import e2m1_table

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _codes(outputs: int, inputs: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)


def _scales(outputs: int, groups: int) -> torch.Tensor:
    return (torch.rand(outputs, groups) * 0.02 + 0.001).half()


def _integers(bits: int, group: int, *, has_zeros: bool = False) -> Callable[[int, int], QuantizedWeight]:
    def make(outputs: int, inputs: int) -> QuantizedWeight:
        shape = (outputs, -(-inputs // group))
        zeros = torch.full(shape, 1 << (bits - 1), dtype=torch.uint8)
        if has_zeros:
            zeros = torch.randint(0, 1 << bits, shape, dtype=torch.uint8)
        codes = _codes(outputs, inputs, bits)
        return QuantizedWeight(codes=codes, scales=_scales(*shape), zeros=zeros, group=group, bits=bits)

    return make


def _k_quant(outputs: int, inputs: int) -> QuantizedWeight:
    """Q4_K: 6 bits of scale and min for 32 inputs, and factors of these for 256."""
    groups = inputs // 32
    return QuantizedWeight(
        codes=_codes(outputs, inputs, 4),
        scales=torch.randint(0, 64, (outputs, groups), dtype=torch.uint8),
        mins=torch.randint(0, 64, (outputs, groups), dtype=torch.uint8),
        scale_factors=_scales(outputs, groups // 8) / 32,
        min_factors=_scales(outputs, groups // 8) / 32,
        group=32,
        bits=4,
    )


def _six_bits(outputs: int, inputs: int) -> QuantizedWeight:
    """Q6_K: signed scales for 16 inputs, and a factor of these for 256."""
    groups = inputs // 16
    return QuantizedWeight(
        codes=_codes(outputs, inputs, 6),
        scales=torch.randint(-100, 100, (outputs, groups), dtype=torch.int8),
        zeros=torch.full((outputs, groups), 32, dtype=torch.uint8),
        scale_factors=_scales(outputs, groups // 16) / 64,
        group=16,
        bits=6,
    )


def _table(table: torch.Tensor, group: int) -> Callable[[int, int], QuantizedWeight]:
    def make(outputs: int, inputs: int) -> QuantizedWeight:
        scales = _scales(outputs, -(-inputs // group)) / 16
        return QuantizedWeight(codes=_codes(outputs, inputs, 4), scales=scales, table=table, group=group, bits=4)

    return make


def _signed(group: int | None, *, largest: int = 127, bits: int = 8) -> Callable[[int, int], QuantizedWeight]:
    def make(outputs: int, inputs: int) -> QuantizedWeight:
        codes = torch.randint(-largest - 1, largest + 1, (outputs, inputs), dtype=torch.int8)
        own = group or inputs
        return QuantizedWeight(codes=codes, scales=_scales(outputs, -(-inputs // own)) / 16, group=own, bits=bits)

    return make


def _float8(group: int | None) -> Callable[[int, int], QuantizedWeight]:
    def make(outputs: int, inputs: int) -> QuantizedWeight:
        codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        own = group or inputs
        return QuantizedWeight(codes=codes, scales=_scales(outputs, -(-inputs // own)).float(), group=own, bits=8)

    return make


def _sorted(outputs: int, inputs: int) -> QuantizedWeight:
    weight = _integers(4, 32, has_zeros=True)(outputs, inputs)
    return QuantizedWeight(
        codes=weight.codes, scales=weight.scales, zeros=weight.zeros, group=32, bits=4, order=torch.randperm(inputs)
    )


FORMS: dict[str, Callable[[int, int], QuantizedWeight]] = {
    "w4": _integers(4, 128),
    "w4 zeros": _integers(4, 32, has_zeros=True),
    "w4 signed": _signed(64, largest=7, bits=4),
    "w4 sorted": _sorted,
    "w3": _integers(3, 64),
    "w8": _integers(8, 128, has_zeros=True),
    "int8 of outputs": _signed(None),
    "int8 of 32": _signed(32),
    "k-quant": _k_quant,
    "six bits": _six_bits,
    "float8 of outputs": _float8(None),
    "float8 of blocks": _float8(128),
    "e2m1 of 16": _table(e2m1_table(), 16),
    "e2m1 of 32": _table(e2m1_table(), 32),
    "iq4 of 32": _table(torch.tensor(_IQ4, dtype=torch.int8), 32),
}


def described_weight(form: str, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    """`num_inputs` must be whole blocks of the form: 256 for k-quants."""
    return FORMS[form](num_outputs, num_inputs)
