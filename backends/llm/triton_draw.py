"""Drawing tokens of logits on a GPU without sorting them; `draw.draw_by_sorting` is the same in torch.

A row's floor is found by searching the bits of its weights: those of floats that are not negative have their order. A
pass over the row counts what is at least as great as each of three pivots, and leaves a quarter of the bits; it ends
when one token is left between the bounds, or one value. Rows without top_k and top_p do not search. Shares are
integers, so their sums are those of any other order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# As `draw.ONE_SHARE`.
_ONE_SHARE = tl.constexpr(float(1 << 46))
_TILE = 2048


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["columns"])
def _soften(logits, columns, weights, size, num_rows, stride, tile: tl.constexpr):
    """One row's softmax at its temperature, of a row that is drawn."""
    row = tl.program_id(0)
    if tl.load(columns + 5 * num_rows + row) == 0.0:
        temperature = tl.load(columns + row).to(tl.float32)
        logits += row.to(tl.int64) * stride
        weights += row.to(tl.int64) * size
        bests = tl.full([tile], float("-inf"), tl.float32)
        totals = tl.zeros([tile], tl.float32)
        for start in range(0, size, tile):
            places = start + tl.arange(0, tile)
            values = tl.load(logits + places, mask=places < size, other=float("-inf")).to(tl.float32) / temperature
            higher = tl.maximum(bests, values)
            bases = tl.where(higher == float("-inf"), 0.0, higher)
            totals = totals * tl.exp(bests - bases) + tl.exp(values - bases)
            bests = higher
        best = tl.max(bests, axis=0)
        base = tl.where(best == float("-inf"), 0.0, best)
        total = tl.sum(totals * tl.exp(bests - base), axis=0)
        for start in range(0, size, tile):
            places = start + tl.arange(0, tile)
            is_token = places < size
            values = tl.load(logits + places, mask=is_token, other=float("-inf")).to(tl.float32) / temperature
            tl.store(weights + places, tl.exp(values - base) / total, mask=is_token)


@triton.jit
def _load(weights, start, size, tile: tl.constexpr):
    places = start + tl.arange(0, tile)
    values = tl.load(weights + places, mask=places < size, other=0.0)
    return tl.where(values == values, values, 0.0)  # without NaNs


@triton.jit
def _tails(weights, size, pivots, floor, by_mass: tl.constexpr, tile: tl.constexpr):
    """Of each of the four pivots [4] (int32): how many tokens have at least its bits, and what is compared with the
    target: that number, or the shares of those tokens together."""
    counts = tl.zeros([4], tl.int32)
    masses = tl.zeros([4], tl.int64)
    for start in range(0, size, tile):
        values = _load(weights, start, size, tile)
        bits = values.to(tl.int32, bitcast=True)
        is_in_tail = (bits[None, :] >= pivots[:, None]) & (bits[None, :] >= floor) & (bits[None, :] > 0)
        counts += tl.sum(is_in_tail.to(tl.int32), axis=1)
        if by_mass:
            shares = (values * _ONE_SHARE).to(tl.int64)
            masses += tl.sum(tl.where(is_in_tail, shares[None, :], 0), axis=1)
    if not by_mass:
        masses = counts.to(tl.int64)
    return counts, masses


@triton.jit
def _threshold(weights, size, floor, high, target, by_mass: tl.constexpr, tile: tl.constexpr):
    """The bits of the greatest weight of at least `floor` whose tail reaches the target; that of `high` does not.

    They are those of a weight, or lie between it and the next smaller one.
    """
    low, low_count, high_count = floor, size, 0
    while (high - low > 1) & (low_count - high_count > 1):
        step = (high - low + 3) // 4
        # The last pivot is where the search ended before.
        index = tl.arange(0, 4)
        pivots = tl.where(index < 3, low + (index + 1) * step, high)
        counts, masses = _tails(weights, size, pivots, floor, by_mass, tile)
        reached = tl.sum(((masses >= target) & (index < 3)).to(tl.int32), axis=0)
        high_count = tl.sum(tl.where(index == reached, counts, 0), axis=0)
        if reached > 0:
            low_count = tl.sum(tl.where(index == reached - 1, counts, 0), axis=0)
        high = tl.minimum(high, low + (reached + 1) * step)
        low = low + reached * step
    return low


@triton.jit
def _kept_shares(weights, start, size, floor, tile: tl.constexpr):
    """Of a tile's weights; 0 of those below the floor."""
    values = _load(weights, start, size, tile)
    return tl.where(values.to(tl.int32, bitcast=True) >= floor, (values * _ONE_SHARE).to(tl.int64), 0)


@triton.jit
def _mass(weights, size, floor, tile: tl.constexpr):
    mass = tl.zeros([1], tl.int64)
    for start in range(0, size, tile):
        mass += tl.sum(_kept_shares(weights, start, size, floor, tile), axis=0)
    return tl.sum(mass, axis=0)


@triton.jit
def _find(weights, size, floor, total, noise, tile: tl.constexpr):
    """The first token at which the running sum of shares passes that part of their total, which is not 0."""
    target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    running = total * 0
    start, found = 0, -1
    while found < 0:
        shares = _kept_shares(weights, start, size, floor, tile)
        own = tl.sum(shares, axis=0)
        if running + own > target:
            sums = running + tl.cumsum(shares, axis=0)
            found = start + tl.sum((sums <= target).to(tl.int32), axis=0)
        running += own
        start += tile
    return found


@triton.jit
def _greatest(logits, size, tile: tl.constexpr):
    """The first token with the greatest logit."""
    best = float("-inf")
    found = 0
    for start in range(0, size, tile):
        places = start + tl.arange(0, tile)
        values = tl.load(logits + places, mask=places < size, other=float("-inf")).to(tl.float32)
        values = tl.where(values == values, values, float("-inf"))
        own = tl.max(values, axis=0)
        if own > best:
            best = own
            found = start + tl.argmax(values, axis=0)
    return found


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["columns"])
def _draw(logits, weights, columns, output, size, num_rows, stride, tile: tl.constexpr):
    """One row."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    weights += row.to(tl.int64) * size
    total = tl.sum(tl.zeros([1], tl.int64), axis=0)
    floor = 0
    if tl.load(columns + 5 * num_rows + row) == 0.0:
        best = tl.sum(tl.zeros([1], tl.float32), axis=0)
        for start in range(0, size, tile):
            best = tl.maximum(best, tl.max(_load(weights, start, size, tile), axis=0))
        floor = (tl.load(columns + num_rows + row).to(tl.float32) * best).to(tl.int32, bitcast=True)
        above = best.to(tl.int32, bitcast=True) + 1
        top_k, top_p = tl.load(columns + 3 * num_rows + row), tl.load(columns + 2 * num_rows + row)
        if (top_k > 0.0) & (top_k < size):
            floor = _threshold(weights, size, floor, above, top_k.to(tl.int64), False, tile)
        total = _mass(weights, size, floor, tile)
        if (top_p < 1.0) & (total > 0):
            # As an integer, rounded up.
            wanted = top_p * total.to(tl.float64)
            target = wanted.to(tl.int64)
            target += (target.to(tl.float64) < wanted).to(tl.int64)
            floor = _threshold(weights, size, floor, above, target, True, tile)
            total = _mass(weights, size, floor, tile)
    if total > 0:
        found = _find(weights, size, floor, total, tl.load(columns + 4 * num_rows + row), tile)
    else:
        found = _greatest(logits, size, tile)
    tl.store(output + row, found.to(tl.int64))


def soften(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The weights that `draw` takes: the softmax of logits by the temperatures of `columns`, without meaning in rows
    that are not drawn. One pass reads the logits in their datatype, a second one writes."""
    num_rows, size = logits.shape
    weights = torch.empty(num_rows, size, dtype=torch.float32, device=logits.device)
    columns = columns.contiguous()
    _soften[(num_rows,)](logits, columns, weights, size, num_rows, logits.stride(0), tile=_TILE, num_warps=16)
    return weights


def draw(logits: torch.Tensor, weights: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """See `draw.draw_on_device`; `weights` float32 [rows, vocabulary] are the softmax of `logits`, without gaps."""
    num_rows, size = logits.shape
    output = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    columns = columns.contiguous()
    _draw[(num_rows,)](logits, weights, columns, output, size, num_rows, logits.stride(0), tile=_TILE, num_warps=16)
    return output
