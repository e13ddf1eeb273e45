"""Floats, rounded to the nearest of 4 and 8 bits, as other servers round them too."""

from __future__ import annotations

import torch

from .quantized_weight import QuantizedWeight

GROUP = 32
_LARGEST_FLOAT8 = 448.0
_SMALLEST_SCALE = 1e-12
# Inputs after which the error is carried to all others at once; what the products' diagonal grows by, of its mean.
_COLUMNS = 128
_DAMPING = 0.01
# Of the largest weight of a group, what is tried as the largest code.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


def round_integers(
    weight: torch.Tensor, bits: int, group: int, importance: torch.Tensor | None = None
) -> QuantizedWeight:
    """[outputs, inputs] with a scale in float16 for each `group` inputs; zero is in the middle of the codes.

    The largest weight of a group keeps its place. With `importance` [inputs], how much the square of an error counts,
    it may be cut off where all others gain more.
    """
    padding = -weight.shape[1] % group
    grouped = torch.nn.functional.pad(weight.float(), (0, padding)).unflatten(1, (-1, group))
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    counts = None if importance is None else torch.nn.functional.pad(importance, (0, padding)).unflatten(0, (-1, group))
    scales = _scales(grouped, bits, counts)
    steps = scales.float().clamp_(min=_SMALLEST_SCALE)[:, :, None]
    codes = (grouped / steps).round_().add_(middle).clamp_(0, top).to(torch.uint8).flatten(1)
    return QuantizedWeight(
        codes=codes[:, : weight.shape[1]].contiguous(),
        scales=scales,
        zeros=torch.full_like(scales, middle, dtype=torch.uint8),
        group=group,
        bits=bits,
    )


def _scales(grouped: torch.Tensor, bits: int, counts: torch.Tensor | None) -> torch.Tensor:
    """float16 [..., groups] of weights [..., groups, n]; `counts` [groups, n], how much each error counts."""
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    widest = grouped.abs().amax(dim=-1) / (top / 2)
    if counts is None:
        return widest.half()
    best, found = torch.full_like(widest, float("inf")), widest.half()
    for share in _SHARES:
        scales = (widest * share).half()
        steps = scales.float().clamp_(min=_SMALLEST_SCALE)[..., None]
        rounded = (grouped / steps).round_().clamp_(-middle, top - middle).mul_(steps)
        error = (rounded.sub_(grouped).square_() * counts).sum(dim=-1)
        better = error < best
        best, found = torch.where(better, error, best), torch.where(better, scales, found)
    return found


def round_by_products(weight: torch.Tensor, products: torch.Tensor, bits: int, group: int) -> QuantizedWeight:
    """As `round_integers`, in the order of the inputs, and what is lost is made up for by those that follow (GPTQ).

    `products` [inputs, inputs]: the mean products of the inputs with each other. `inputs` are whole groups.
    """
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    left = weight.float().clone()
    factor, counts = _upper_factor(products), products.diagonal()
    num_outputs, num_inputs = left.shape
    codes = torch.empty(num_outputs, num_inputs, dtype=torch.uint8)
    scales = torch.empty(num_outputs, num_inputs // group, dtype=torch.float16)
    step = torch.ones(num_outputs)
    for first in range(0, num_inputs, _COLUMNS):
        block = left[:, first : first + _COLUMNS]
        errors = torch.empty_like(block)
        for at in range(block.shape[1]):
            column = first + at
            if column % group == 0:
                scale = _scales(block[:, at : at + group], bits, counts[column : column + group])
                scales[:, column // group] = scale
                step = scale.float().clamp_(min=_SMALLEST_SCALE)
            code = (block[:, at] / step).round_().add_(middle).clamp_(0, top)
            codes[:, column] = code.to(torch.uint8)
            errors[:, at] = (block[:, at] - (code - middle) * step) / factor[column, column]
            block[:, at:].addr_(errors[:, at], factor[column, column : first + block.shape[1]], alpha=-1.0)
        left[:, first + _COLUMNS :] -= errors @ factor[first : first + block.shape[1], first + _COLUMNS :]
    zeros = torch.full_like(scales, middle, dtype=torch.uint8)
    return QuantizedWeight(codes=codes, scales=scales, zeros=zeros, group=group, bits=bits)


def _upper_factor(products: torch.Tensor) -> torch.Tensor:
    """The factor U of the inverse, U^T U. What inputs never have, and nearly never, is damped."""
    damped = products.double().clone()
    diagonal = damped.diagonal()
    diagonal += _DAMPING * diagonal.mean().clamp_(min=_SMALLEST_SCALE)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()


def round_float8(weight: torch.Tensor) -> QuantizedWeight:
    """[outputs, inputs] with a scale in float32 for each output."""
    floats = weight.float()
    scales = floats.abs().amax(dim=1, keepdim=True).clamp_(min=_SMALLEST_SCALE) / _LARGEST_FLOAT8
    codes = (floats / scales).to(torch.float8_e4m3fn)
    return QuantizedWeight(codes=codes, scales=scales, group=weight.shape[1], bits=8)
