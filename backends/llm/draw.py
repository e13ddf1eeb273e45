"""Drawing a token of each row: temperature, min_p, top_k, top_p, then one uniform number against the running sum.

The candidates are defined by values, so that they do not depend on a sorting order: top_k keeps tokens at least as
probable as the k-th most probable token, top_p keeps a token while the mass of the strictly more probable ones (among
those that min_p and top_k left) is below p. Two programs of one meaning: on the CPU rows go through the cache one by
one, where sorting the few candidates that can matter costs microseconds; on a device all rows go at once, unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from .sampling_params import SamplingParams

_MASK = (1 << 64) - 1
# The increment of SplitMix64 (Steele, Lea, Flood 2014) and the multipliers of its 64-bit finaliser.
_WEYL = 0x9E3779B97F4A7C15
_MULTIPLIER_A = 0xBF58476D1CE4E5B9
_MULTIPLIER_B = 0x94D049BB133111EB


def _mix(value: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit words in which each input bit moves every output bit."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_A) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_B) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int, draw: int = 0) -> float:
    """A number in [0, 1) with 53 random bits. `draw` numbers the numbers that one position needs.

    Seed, position and draw are mixed one after the other, so neighbours in one of them have nothing in common.
    """
    state = _mix(seed + _WEYL)
    state = _mix(state + (position + 1) * _WEYL)
    state = _mix(state + draw * _WEYL)
    return (state >> 11) * (1.0 / (1 << 53))


# Elements whose sum is taken at once where a running sum is needed: the sum is then mostly a vector operation.
_SPAN = 128
Row = npt.NDArray[np.float32]


def draw_on_host(logits: Row, params: SamplingParams, noise: float) -> int:
    """A token of one row of logits [vocabulary]; `noise` in [0, 1). Greedy rows do not come here."""
    weights = logits / np.float32(params.temperature)
    best = weights.max()
    if not np.isfinite(best):  # all are forbidden, or the network overflowed: no share can be told, others must go on
        return int(weights.argmax())
    weights -= best
    np.exp(weights, out=weights)  # of the most probable token: 1
    floor = min_weight(weights, params)
    if floor <= 0.0:
        return _place_of(weights, noise, "right")
    kept = np.flatnonzero(weights >= floor)
    return int(kept[_place_of(weights[kept], noise, "right")])


def min_weight(weights: Row, params: SamplingParams) -> float:
    """The least weight that may be drawn; weights are relative to the greatest."""
    floor = params.min_p
    if 0 < params.top_k < len(weights):
        place = len(weights) - params.top_k
        floor = max(floor, float(np.partition(weights, place)[place]))
    if params.top_p < 1.0:
        floor = max(floor, _nucleus_floor(weights, floor, params.top_p))
    return floor


def _nucleus_floor(weights: Row, floor: float, top_p: float) -> float:
    """The least weight of the nucleus among the weights of at least `floor`.

    Whatever weighs no more than the mass outside shared among all is outside: what is left is short, and sorted.
    """
    if floor > 0.0:
        weights = weights[weights >= floor]
    total = float(weights.sum(dtype=np.float64))
    negligible = np.float32((1.0 - top_p) * total / len(weights) * 0.999)
    candidates = np.sort(weights[weights > negligible])[::-1]
    return float(candidates[_place_of(candidates, top_p, "left", total)])


def _place_of(weights: Row, share: float, side: Literal["left", "right"], total: float | None = None) -> int:
    """The index at which the running sum of the weights reaches ("left") or passes ("right") a share of their total."""
    num_spans = -(-len(weights) // _SPAN)
    padded = np.zeros(num_spans * _SPAN, dtype=np.float32)
    padded[: len(weights)] = weights
    spans = padded.reshape(num_spans, _SPAN)
    span_sums = np.cumsum(spans.sum(axis=1, dtype=np.float64))
    target = share * (float(span_sums[-1]) if total is None else total)
    span = min(int(np.searchsorted(span_sums, target, side=side)), num_spans - 1)
    sums = np.cumsum(spans[span], dtype=np.float64)
    if span:
        sums += span_sums[span - 1]
    place = int(np.searchsorted(sums, target, side=side))
    if place == _SPAN:  # the two sums were rounded differently: the span's last token that has weight
        place = int(np.flatnonzero(spans[span])[-1])
    return span * _SPAN + place


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """The inputs of `draw_on_device`, float32 columns [rows, 1]. `top_k` 0 and `top_p` 1 have no effect."""

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    noise: torch.Tensor
    is_greedy: torch.Tensor
    is_sorted: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], noise: Sequence[float], device: torch.device) -> DrawInputs:
        columns = [
            [1.0 if one.is_greedy else one.temperature for one in params],
            [one.min_p for one in params],
            [one.top_p for one in params],
            [float(max(0, one.top_k)) for one in params],
            list(noise),
            [float(one.is_greedy) for one in params],
        ]
        packed = torch.tensor(columns, dtype=torch.float32)
        on_device = (packed.pin_memory() if device.type != "cpu" else packed).to(device, non_blocking=True)
        is_sorted = any(not one.is_greedy and (one.top_p < 1.0 or one.top_k > 0) for one in params)
        temperature, min_p, top_p, top_k, uniform, is_greedy = (column.unsqueeze(1) for column in on_device)
        return cls(temperature, min_p, top_p, top_k, uniform, is_greedy > 0, is_sorted)


def draw_on_device(logits: torch.Tensor, inputs: DrawInputs) -> torch.Tensor:
    """A token of every row of logits [rows, vocabulary], int64 [rows]; nothing is read back.

    No shape depends on a value, so a CUDA graph can hold it, one for `is_sorted` and one for not.
    """
    weights = torch.softmax(logits / inputs.temperature, dim=-1)
    floor = inputs.min_p * weights.amax(dim=-1, keepdim=True)
    if inputs.is_sorted:
        floor = _floors_by_sorting(weights, floor, inputs)
    weights = torch.where(weights >= floor, weights, 0.0)
    sums = weights.cumsum(dim=-1)
    total = sums[:, -1:]
    # Rounded up to the total, the number would find no token.
    target = torch.minimum(inputs.noise * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(sums, target, right=True).clamp_(max=logits.shape[1] - 1)
    return torch.where(inputs.is_greedy, logits.argmax(dim=-1, keepdim=True), drawn).squeeze(1)


def _floors_by_sorting(weights: torch.Tensor, floor: torch.Tensor, inputs: DrawInputs) -> torch.Tensor:
    descending = weights.sort(dim=-1, descending=True).values
    size = weights.shape[1]
    place = torch.where(inputs.top_k > 0, inputs.top_k, float(size)).long().clamp_(1, size) - 1
    floor = torch.maximum(floor, descending.gather(1, place))
    sums = torch.where(descending >= floor, descending, 0.0).cumsum(dim=-1)
    # How many tokens it takes to have the mass: that of the last one is the least that is kept.
    place = (sums < inputs.top_p * sums[:, -1:]).sum(dim=-1, keepdim=True).clamp_(max=size - 1)
    nucleus = torch.where(inputs.top_p < 1.0, descending.gather(1, place), 0.0)
    return torch.maximum(floor, nucleus)
