"""Weights in floats of 8 and 4 bits with scales: one for all, for each output, for blocks, or for runs of inputs."""

from __future__ import annotations

import torch

from modelserver.backend import InvalidArgumentError

from ..models.linear_tensors import FLOATS, LinearTensors, Part
from .bits import unpack_nibbles
from .quantized_weight import QuantizedWeight

FLOAT8 = (torch.float8_e4m3fn,)
_SCALES = (*FLOATS, torch.float8_e8m0fnu)
# The values of e2m1, doubled to be integers: a sign, two bits of exponent and one of mantissa.
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
NVFP4_GROUP, MX_GROUP = 16, 32


def read_float8(
    tensors: LinearTensors, part: Part, suffix: str, *, block: tuple[int, int] | None = None
) -> QuantizedWeight:
    """`weight` in e4m3, and scales in the tensor `suffix`, whose shape says what each serves.

    `block` is that of outputs and inputs which share a scale, where the config says so.
    """
    outputs, inputs = part.num_outputs, part.num_inputs
    codes = tensors.stored(part, "weight", (outputs, inputs), FLOAT8)
    scales = tensors.stored(part, suffix, None, _SCALES).float()
    if block is not None:
        return QuantizedWeight(codes=codes, scales=_by_block(part, suffix, scales, block), group=block[1], bits=8)
    return QuantizedWeight(codes=codes, scales=by_output(part, suffix, scales), group=inputs, bits=8)


def read_mxfp8(tensors: LinearTensors, part: Part) -> QuantizedWeight:
    """e4m3, and a power of two for each 32 inputs."""
    outputs, inputs = part.num_outputs, part.num_inputs
    codes = tensors.stored(part, "weight", (outputs, inputs), FLOAT8)
    exponents = tensors.stored(part, "weight_scale", (outputs, -(-inputs // MX_GROUP)), (torch.uint8,))
    return QuantizedWeight(codes=codes, scales=powers_of_two(exponents), group=MX_GROUP, bits=8)


def read_nvfp4(
    tensors: LinearTensors, part: Part, suffix: str, whole_suffix: str, *, is_divisor: bool
) -> QuantizedWeight:
    """e2m1 in the bytes of `suffix`, scales in e4m3 for each 16 inputs, and one scale for all.

    `is_divisor`: the one for all is what the others are divided by.
    """
    outputs, inputs = part.num_outputs, part.num_inputs
    codes = _nibbles(tensors, part, suffix)
    scales = tensors.stored(part, "weight_scale", (outputs, -(-inputs // NVFP4_GROUP)), FLOAT8)
    whole = tensors.stored(part, whole_suffix, None, FLOATS).float()
    if whole.numel() != 1:
        raise InvalidArgumentError(f"{part.name}.{whole_suffix} must hold one scale, it has {list(whole.shape)}")
    factor = (1.0 / whole if is_divisor else whole).reshape(1, 1) * 0.5
    return QuantizedWeight(
        codes=codes,
        scales=scales.half(),
        scale_factors=factor.expand(outputs, 1).contiguous(),
        table=e2m1_table(),
        group=NVFP4_GROUP,
        bits=4,
    )


def read_mxfp4(tensors: LinearTensors, part: Part) -> QuantizedWeight:
    """e2m1 in the bytes of `weight_packed`, and a power of two for each 32 inputs."""
    shape = (part.num_outputs, -(-part.num_inputs // MX_GROUP))
    exponents = tensors.stored(part, "weight_scale", shape, (torch.uint8,))
    return mxfp4(_nibbles(tensors, part, "weight_packed"), exponents)


def mxfp4(codes: torch.Tensor, exponents: torch.Tensor) -> QuantizedWeight:
    """Of codes of e2m1 [outputs, inputs] and exponents of powers of two, biased by 127 [outputs, groups]."""
    scales = powers_of_two(exponents) * 0.5
    return QuantizedWeight(codes=codes, scales=scales, table=e2m1_table(), group=MX_GROUP, bits=4)


def e2m1_table() -> torch.Tensor:
    """By code, twice the value."""
    return torch.tensor(_E2M1, dtype=torch.int8)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """float32: 2 ** (exponent - 127) of bytes. 255 stands for no number."""
    return exponents.view(torch.float8_e8m0fnu).float()


def by_output(part: Part, suffix: str, scales: torch.Tensor) -> torch.Tensor:
    """Scales for each output, for all, or for each section of outputs -> [outputs, 1]."""
    outputs = part.num_outputs
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(outputs, 1).contiguous()
    if scales.shape in ((outputs,), (outputs, 1)):
        return scales.reshape(outputs, 1)
    if scales.numel() == len(part.sections):
        each = torch.arange(len(part.sections)).repeat_interleave(torch.tensor(part.sections))
        return scales.reshape(-1)[each][:, None]
    raise InvalidArgumentError(
        f"{part.name}.{suffix} has the shape {list(scales.shape)}, expected one scale, or {outputs} for the outputs"
    )


def _by_block(part: Part, suffix: str, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[blocks of outputs, blocks of inputs] -> [outputs, blocks of inputs]. Lone dimensions between are dropped."""
    expected = (-(-part.num_outputs // block[0]), -(-part.num_inputs // block[1]))
    found = tuple(scales.shape)
    if found not in (expected, (expected[0], 1, expected[1], 1)):
        raise InvalidArgumentError(
            f"{part.name}.{suffix} has the shape {list(found)}, expected {list(expected)} for blocks of "
            f"{block[0]} x {block[1]}"
        )
    return scales.reshape(expected).repeat_interleave(block[0], dim=0)[: part.num_outputs].contiguous()


def _nibbles(tensors: LinearTensors, part: Part, suffix: str) -> torch.Tensor:
    shape = (part.num_outputs, -(-part.num_inputs // 2))
    return unpack_nibbles(tensors.stored(part, suffix, shape, (torch.uint8,)))[:, : part.num_inputs]
