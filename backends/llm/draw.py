"""Drawing a token of each row: temperature, min_p, top_k, top_p, then one uniform number against the running sum.

The candidates are defined by values, so that they do not depend on a sorting order: top_k keeps tokens at least as
probable as the k-th most probable token, top_p keeps a token while the mass of the strictly more probable ones (among
those that min_p and top_k left) is below p. Two programs of one meaning: on the CPU rows go through the cache one by
one, where sorting the few candidates that can matter costs microseconds; on a device all rows go at once, unread, by
the kernel of `triton_draw` or by sorting. Both of these sum shares that are integers, so they draw the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from .kernels import device_processors
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


def uniforms(seeds: Sequence[int], positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """`uniform` of each seed and position, for all rows of a step at once."""
    with np.errstate(over="ignore"):
        state = _mixed(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + np.uint64(_WEYL))
        state = _mixed(state + (np.asarray(positions).astype(np.uint64) + np.uint64(1)) * np.uint64(_WEYL))
        return (_mixed(state) >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53))


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`_mix` of each."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIER_A)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MULTIPLIER_B)
    return values ^ (values >> np.uint64(31))


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


# Rows of `draw_columns`, float64 [NUM_DRAW_COLUMNS, rows].
NUM_DRAW_COLUMNS = 6
DrawColumns = npt.NDArray[np.float64]
# The share of a weight of 1. The weights of a row sum to 1, so sums of shares are exact, in any order.
ONE_SHARE = 1 << 46


def draw_columns(params: Sequence[SamplingParams], noise: Iterable[float]) -> DrawColumns:
    """What `draw_on_device` takes, [NUM_DRAW_COLUMNS, rows]: temperature, min_p, top_p, top_k, noise, and whether the
    row is greedy. A top_k of 0 and a top_p of 1 have no effect."""
    rows = [
        (
            1.0 if one.is_greedy else one.temperature,
            one.min_p,
            one.top_p,
            float(max(0, one.top_k)),
            number,
            float(one.is_greedy),
        )
        for one, number in zip(params, noise, strict=True)
    ]
    return np.ascontiguousarray(np.array(rows, dtype=np.float64).T)


def draw_on_device(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """A token of every row of logits [rows, vocabulary] in any datatype, int64 [rows]; nothing is read back.

    `columns` float64 [NUM_DRAW_COLUMNS, rows]. No shape depends on a value, so a CUDA graph can hold it. A row without
    any mass, because all its tokens are forbidden or the network overflowed, gives its greatest logit.
    """
    if device_processors(logits.device) is not None:
        from . import triton_draw

        return triton_draw.draw(logits, triton_draw.soften(logits, columns), columns)
    return draw_by_sorting(logits, torch.softmax(logits / columns[0, :, None].float(), dim=-1), columns)


def draw_by_sorting(logits: torch.Tensor, weights: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The draw of all rows in torch: the definition of `triton_draw.draw`, and what stands for it without Triton.

    `weights` [rows, vocabulary] are the softmax of `logits`.
    """
    _, min_p, top_p, top_k, noise, is_greedy = columns.unsqueeze(2)
    weights = weights.nan_to_num(0.0)
    floor = min_p.float() * weights.amax(dim=-1, keepdim=True)
    descending = weights.sort(dim=-1, descending=True).values
    size = weights.shape[1]
    place = torch.where(top_k > 0, top_k, float(size)).long().clamp_(1, size) - 1
    floor = torch.where(top_k > 0, torch.maximum(floor, descending.gather(1, place)), floor)
    sums = torch.where(descending >= floor, _shares(descending), 0).cumsum(dim=-1)
    # How many tokens it takes to have the mass: that of the last one is the least that is kept.
    target = (top_p * sums[:, -1:]).ceil().long()
    place = (sums < target).sum(dim=-1, keepdim=True).clamp_(max=size - 1)
    floor = torch.where(top_p < 1.0, torch.maximum(floor, descending.gather(1, place)), floor)
    sums = torch.where(weights >= floor, _shares(weights), 0).cumsum(dim=-1)
    total = sums[:, -1:]
    # Rounded up to the total, the number would find no token.
    target = torch.minimum((noise * total).long(), total - 1)
    drawn = torch.searchsorted(sums, target, right=True).clamp_(max=size - 1)
    is_greatest = (is_greedy > 0) | (total == 0)
    return torch.where(is_greatest, logits.argmax(dim=-1, keepdim=True), drawn).squeeze(1)


def _shares(weights: torch.Tensor) -> torch.Tensor:
    return (weights * float(ONE_SHARE)).long()
