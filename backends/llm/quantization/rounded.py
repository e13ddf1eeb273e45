"""Floats, rounded to the nearest of 4 and 8 bits, as other servers round them too."""

from __future__ import annotations

import torch

from .quantized_weight import QuantizedWeight

GROUP = 32
_LARGEST_FLOAT8 = 448.0
_SMALLEST_SCALE = 1e-12


def round_integers(weight: torch.Tensor, bits: int, group: int) -> QuantizedWeight:
    """[outputs, inputs] with a scale in float16 for each `group` inputs; zero is in the middle of the codes."""
    padding = -weight.shape[1] % group
    grouped = torch.nn.functional.pad(weight.float(), (0, padding)).unflatten(1, (-1, group))
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    scales = (grouped.abs().amax(dim=2) / (top / 2)).half()
    steps = scales.float().clamp_(min=_SMALLEST_SCALE)[:, :, None]
    codes = (grouped / steps).round_().add_(middle).clamp_(0, top).to(torch.uint8).flatten(1)
    return QuantizedWeight(
        codes=codes[:, : weight.shape[1]].contiguous(),
        scales=scales,
        zeros=torch.full_like(scales, middle, dtype=torch.uint8),
        group=group,
        bits=bits,
    )


def round_float8(weight: torch.Tensor) -> QuantizedWeight:
    """[outputs, inputs] with a scale in float32 for each output."""
    floats = weight.float()
    scales = floats.abs().amax(dim=1, keepdim=True).clamp_(min=_SMALLEST_SCALE) / _LARGEST_FLOAT8
    codes = (floats / scales).to(torch.float8_e4m3fn)
    return QuantizedWeight(codes=codes, scales=scales, group=weight.shape[1], bits=8)
