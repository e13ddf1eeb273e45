"""Floats in blocks of GGUF's types: the inverse of gguf_blocks.py, with the scales that lose least.

`importance` [inputs] says how much an error in the weights of each input counts: the mean square of what that input
was on a calibration text. Without it large weights count more than small ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..checkpoint.gguf_blocks import plain_dtype
from ..checkpoint.gguf_types import TensorType

# Values that are searched at once: few enough for what lies between to stay in a cache.
_CHUNK_VALUES = 1 << 18
_SYMMETRIC_STEPS = range(-9, 10)
_ASYMMETRIC_STEPS = range(21)
_STEP = 0.1
_LEAST_IMPORTANCE = 1e-4


def encode_rows(kind: TensorType, weight: torch.Tensor, importance: torch.Tensor | None = None) -> torch.Tensor:
    """A matrix [rows, inputs] of any float datatype, as uint8 [rows, bytes of a row]. The inputs are whole blocks."""
    plain = plain_dtype(kind)
    if plain is not None:
        return weight.to(plain).contiguous().view(torch.uint8).view(weight.shape[0], -1)
    num_rows, num_inputs = weight.shape
    encoded = torch.empty(num_rows, num_inputs // kind.block_len * kind.block_bytes, dtype=torch.uint8)
    step = max(1, _CHUNK_VALUES // num_inputs)
    for first in range(0, num_rows, step):
        values = weight[first : first + step].float()
        blocks = values.reshape(-1, kind.block_len)
        counts = _counts(values, importance).reshape(blocks.shape)
        encoded[first : first + step] = _ENCODERS[kind.name](blocks, counts).reshape(values.shape[0], -1)
    return encoded


def _counts(values: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """How much the square of each weight's error counts."""
    spread = (values * values + values.square().mean(dim=1, keepdim=True)).sqrt_()
    if importance is None:
        return spread
    # An input that the text never used must not be lost.
    return spread * importance.float().clamp(min=_LEAST_IMPORTANCE * float(importance.mean()))


def _nonzero(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values == 0, 1.0, values)


def _symmetric(values: torch.Tensor, counts: torch.Tensor, bits: int) -> torch.Tensor:
    """The scales [groups] with which integers of `bits` bits, times them, are nearest to values [groups, n]."""
    lowest, highest = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    extreme = values.gather(1, values.abs().argmax(dim=1, keepdim=True))
    best, found = torch.full_like(extreme, -1.0), torch.zeros_like(extreme)
    for step in _SYMMETRIC_STEPS:
        codes = (values * ((lowest + _STEP * step) / _nonzero(extreme))).round_().clamp_(lowest, highest)
        weighted = counts * codes
        product = (weighted * values).sum(dim=1, keepdim=True)
        square = _nonzero((weighted * codes).sum(dim=1, keepdim=True))
        gain = product * product / square
        better = gain > best
        best, found = torch.where(better, gain, best), torch.where(better, product / square, found)
    return found.squeeze(1)


def _asymmetric(values: torch.Tensor, counts: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima [groups], none below zero: scale * code - min is nearest to values [groups, n]."""
    most = (1 << bits) - 1
    lowest = values.amin(dim=1, keepdim=True).clamp_(max=0.0)
    width = _nonzero(values.amax(dim=1, keepdim=True).clamp_(min=0.0) - lowest)
    total, total_values = counts.sum(dim=1, keepdim=True), (counts * values).sum(dim=1, keepdim=True)
    best = torch.full_like(lowest, float("inf"))
    scales, mins = width / most, lowest
    for step in _ASYMMETRIC_STEPS:
        codes = ((values - lowest) * ((most - 1 + _STEP * step) / width)).round_().clamp_(0, most)
        weighted = counts * codes
        first, square = weighted.sum(dim=1, keepdim=True), (weighted * codes).sum(dim=1, keepdim=True)
        product = (weighted * values).sum(dim=1, keepdim=True)
        determinant = _nonzero(total * square - first * first)
        scale = (total * product - first * total_values) / determinant
        least = (square * total_values - first * product) / determinant
        scale = torch.where(least > 0, product / _nonzero(square), scale)
        least = least.clamp(max=0.0)
        error = (counts * (scale * codes + least - values).square()).sum(dim=1, keepdim=True)
        better = (error < best) & (scale > 0)
        best, scales, mins = (
            torch.where(better, new, old) for new, old in ((error, best), (scale, scales), (least, mins))
        )
    return scales.squeeze(1), -mins.squeeze(1)


def _bytes_of(halves: torch.Tensor) -> torch.Tensor:
    """float16 [blocks] -> uint8 [blocks, 2]"""
    return halves.half().unsqueeze(1).contiguous().view(torch.uint8)


def _paired(codes: torch.Tensor, group: int) -> torch.Tensor:
    """uint8 [blocks, values] -> [blocks, values / 2]: of twice `group` values the first are the low halves."""
    pairs = codes.unflatten(1, (-1, 2, group))
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _signed_codes(values: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 from 0 on, of values [groups, n] and one scale for each group."""
    middle = 1 << (bits - 1)
    codes = (values / _nonzero(scales.unsqueeze(1))).round_().clamp_(-middle, middle - 1)
    return codes.add_(middle).to(torch.uint8)


def _q8_0(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - nothing is chosen
    scales = (values.abs().amax(dim=1) / 127).half()
    codes = (values / _nonzero(scales.float().unsqueeze(1))).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((_bytes_of(scales), codes.view(torch.uint8)), dim=1)


def _q4_0(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    scales = _symmetric(values, counts, 4).half()
    return torch.cat((_bytes_of(scales), _paired(_signed_codes(values, scales.float(), 4), 16)), dim=1)


def _q5_0(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    scales = _symmetric(values, counts, 5).half()
    codes = _signed_codes(values, scales.float(), 5)
    places = torch.arange(8, dtype=torch.uint8)
    high = ((codes >> 4).unflatten(1, (4, 8)) << places).sum(dim=2, dtype=torch.uint8)
    return torch.cat((_bytes_of(scales), high, _paired(codes & 15, 16)), dim=1)


def _q4_k(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    grouped = values.unflatten(1, (8, 32))
    scales, mins = _asymmetric(grouped.flatten(0, 1), counts.reshape(-1, 32), 4)
    scales, mins = scales.view(-1, 8), mins.view(-1, 8)
    factors, min_factors = (scales.amax(dim=1) / 63).half(), (mins.amax(dim=1) / 63).half()
    small = (scales / _nonzero(factors.float().unsqueeze(1))).round_().clamp_(0, 63)
    small_mins = (mins / _nonzero(min_factors.float().unsqueeze(1))).round_().clamp_(0, 63)
    steps, least = small * factors.float().unsqueeze(1), small_mins * min_factors.float().unsqueeze(1)
    codes = ((grouped + least.unsqueeze(2)) / _nonzero(steps.unsqueeze(2))).round_().clamp_(0, 15).to(torch.uint8)
    packed = _six_bits(small.to(torch.uint8), small_mins.to(torch.uint8))
    return torch.cat((_bytes_of(factors), _bytes_of(min_factors), packed, _paired(codes.flatten(1), 32)), dim=1)


def _six_bits(scales: torch.Tensor, mins: torch.Tensor) -> torch.Tensor:
    """Two times uint8 [blocks, 8] -> [blocks, 12]"""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = mins[:, :4] | (mins[:, 4:] >> 4) << 6
    return torch.cat((first, second, scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4), dim=1)


def _q6_k(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    grouped = values.unflatten(1, (16, 16))
    scales = _symmetric(grouped.flatten(0, 1), counts.reshape(-1, 16), 6).view(-1, 16)
    extreme = scales.gather(1, scales.abs().argmax(dim=1, keepdim=True))
    factors = (extreme / -128).half()
    small = (scales / _nonzero(factors.float())).round_().clamp_(-128, 127)
    codes = _signed_codes(grouped.flatten(0, 1), (small * factors.float()).flatten(), 6).view(-1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    lows = torch.cat((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), dim=2)
    highs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    signed = small.to(torch.int8).view(torch.uint8)
    return torch.cat((lows.flatten(1), highs.flatten(1), signed, _bytes_of(factors.squeeze(1))), dim=1)


_ENCODERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
