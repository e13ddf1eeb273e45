"""Latent attention over paged blocks in Triton, with its launcher; the torch twin is `twins.prefill_attention`.

A layer's blocks [blocks, block_size, 1, 1, head_dim] hold keys, whose last `width` values are the values. All heads of
a token read them, so rows of a product are (query, head) pairs, and a tile of keys is read once for scores and sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_kernels import VARYING, merge_splits, new_splits

_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_WIDTH = 16


@triton.jit(**VARYING)
def _attend(
    queries, blocks, tables, tile_rows, tile_starts, row_starts, num_queries, lens, sums, maxima, totals, output,
    stride_query, stride_table, stride_block, num_heads, scale, num_splits, num_tiles,
    turned: tl.constexpr, padded_turned: tl.constexpr, width: tl.constexpr, padded_width: tl.constexpr,
    lanes: tl.constexpr, block_size: tl.constexpr, tile: tl.constexpr, is_decode: tl.constexpr,
    is_split: tl.constexpr,
):  # fmt: skip
    """Some pairs of a sequence's queries and heads, over one split of what they see."""
    split = tl.program_id(1)
    if is_decode:
        row = tl.program_id(0) // num_tiles
        first_lane = tl.program_id(0) % num_tiles * lanes
        count, first_token = 1, row
    else:
        row = tl.load(tile_rows + tl.program_id(0))
        first_lane = tl.load(tile_starts + tl.program_id(0))
        count, first_token = tl.load(num_queries + row), tl.load(row_starts + row)
    length = tl.load(lens + row)
    lane = first_lane + tl.arange(0, lanes)
    query_index, head = lane // num_heads, lane % num_heads
    is_lane = query_index < count
    query_positions = length - count + query_index
    last_query = tl.minimum((first_lane + lanes - 1) // num_heads, count - 1)
    seen = length - count + last_query + 1
    per_split = tl.cdiv(tl.cdiv(seen, tile), num_splits) * tile
    first, last = split * per_split, tl.minimum((split + 1) * per_split, seen)

    columns, turned_columns = tl.arange(0, padded_width), tl.arange(0, padded_turned)
    is_column, is_turned = columns < width, turned_columns < turned
    places = queries + ((first_token + query_index).to(tl.int64) * stride_query + head * (turned + width))[:, None]
    query = tl.load(places + turned + columns[None, :], mask=is_lane[:, None] & is_column[None, :], other=0.0)
    turned_query = tl.load(places + turned_columns[None, :], mask=is_lane[:, None] & is_turned[None, :], other=0.0)
    best = tl.full([lanes], float("-inf"), tl.float32)
    total = tl.zeros([lanes], tl.float32)
    mixed = tl.zeros([lanes, padded_width], tl.float32)
    for start in range(first, last, tile):
        positions = start + tl.arange(0, tile)
        is_held = positions < last
        ids = tl.load(tables + row * stride_table + positions // block_size, mask=is_held, other=0).to(tl.int64)
        tokens = blocks + (ids * stride_block + positions % block_size * (turned + width))[:, None]
        kept = tl.load(tokens + turned + columns[None, :], mask=is_held[:, None] & is_column[None, :], other=0.0)
        turned_keys = tl.load(tokens + turned_columns[None, :], mask=is_held[:, None] & is_turned[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(kept), input_precision="ieee")
        scores = tl.dot(turned_query, tl.trans(turned_keys), scores, input_precision="ieee") * (scale * _LOG2_E)
        is_seen = is_held[None, :] & (positions[None, :] <= query_positions[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(best - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(kept.dtype), kept, input_precision="ieee")
        best = higher
    place = (first_token + query_index).to(tl.int64) * num_heads + head
    is_output = is_lane[:, None] & is_column[None, :]
    if is_split:
        place = place * num_splits + split
        tl.store(sums + place[:, None] * width + columns[None, :], mixed, mask=is_output)
        tl.store(maxima + place, best, mask=is_lane)
        tl.store(totals + place, total, mask=is_lane)
    else:
        result = mixed / tl.maximum(total, 1e-30)[:, None]
        tl.store(output + place[:, None] * width + columns[None, :], result.to(output.dtype.element_ty), mask=is_output)


def decode(
    queries: torch.Tensor,
    blocks: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    *,
    width: int,
    scale: float,
    num_splits: int,
    lanes: int,
    output: torch.Tensor,
) -> None:
    """The last token of each sequence over its `lens` tokens; a length of 0 gives zeros.

    `output` [sequences, heads * width] gets the result. `lanes` heads are rows of a product. `num_splits`: see
    `triton_kernels.decode_attention`.
    """
    num_rows, num_heads, _ = queries.shape
    sums = maxima = totals = output
    if num_splits > 1:
        sums, maxima, totals = new_splits(queries, num_splits, width)
    num_tiles = triton.cdiv(num_heads, lanes)
    _attend[(num_rows * num_tiles, num_splits)](
        queries, blocks, tables, lens, lens, lens, lens, lens, sums, maxima, totals, output,
        queries.stride(0), tables.stride(0), blocks.stride(0), num_heads, scale, num_splits, num_tiles,
        **_sizes(queries, blocks, width, lanes), is_decode=True, is_split=num_splits > 1,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits(sums, maxima, totals, output)


def prefill(
    queries: torch.Tensor,
    blocks: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    *,
    width: int,
    scale: float,
    num_queries: torch.Tensor,
    row_starts: torch.Tensor,
    tile_rows: torch.Tensor,
    tile_starts: torch.Tensor,
    lanes: int,
    output: torch.Tensor,
) -> None:
    """The last `num_queries` tokens of each sequence, which begin at row `row_starts` of `queries`, causally.

    Tile i has `lanes` pairs of a query and a head of sequence `tile_rows[i]`, query by query, from its pair
    `tile_starts[i]` on. `output` [tokens, heads * width]
    """
    num_heads = queries.shape[1]
    _attend[(tile_rows.shape[0], 1)](
        queries, blocks, tables, tile_rows, tile_starts, row_starts, num_queries, lens, output, output, output, output,
        queries.stride(0), tables.stride(0), blocks.stride(0), num_heads, scale, 1, 1,
        **_sizes(queries, blocks, width, lanes), is_decode=False, is_split=False,
    )  # fmt: skip


def _sizes(queries: torch.Tensor, blocks: torch.Tensor, width: int, lanes: int) -> dict[str, int]:
    turned = queries.shape[2] - width
    return {
        "turned": turned,
        "padded_turned": max(_LEAST_WIDTH, triton.next_power_of_2(turned)),
        "width": width,
        "padded_width": max(_LEAST_WIDTH, triton.next_power_of_2(width)),
        "lanes": lanes,
        "block_size": blocks.shape[1],
        "tile": 16 if queries.dtype is torch.float32 else 32,
        "num_warps": 4 if lanes <= 16 else 8,
        "num_stages": 2,
    }
