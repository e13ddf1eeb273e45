"""Attention over paged blocks in Triton. Each kernel has a launcher here, and its torch twin in `twins`.

Shapes: queries [tokens, heads, head_dim]; a layer's blocks [blocks, block_size, parts, kv heads, head_dim] with a
stride between blocks; block tables [sequences, blocks], int32 or int64. Blocks of int8 or float8_e4m3fn hold codes, and
`scales` [blocks, block_size, 2, kv heads] in float32 what they are multiplied by. Query heads that share a KV head are
rows of one product, so its keys and values are read once. Sums and maxima are float32.
https://arxiv.org/abs/2511.11581 tells which of this pays.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# What differs from step to step, and where it lies in a copy of several arrays: a kernel for each kind of number or
# alignment would be compiled while requests wait.
VARYING = {
    "do_not_specialize": ["stride_table", "num_splits"],
    "do_not_specialize_on_alignment": [
        "slots",
        "tables",
        "lens",
        "num_queries",
        "row_starts",
        "tile_rows",
        "tile_starts",
    ],
}
_LOG2_E = tl.constexpr(1.4426950408889634)
# The fewest rows of a tile that tl.dot multiplies.
_LEAST_ROWS = 16
# Of a row in float32, which tensor cores do not multiply; its values take many registers.
_FLOAT32_BYTES = 4
# Sums of a program, for which the registers of four warps suffice.
_MOST_OF_FOUR_WARPS = 4096
# How keys and values are kept.
_AS_THEY_COME = tl.constexpr(0)
_INT8 = tl.constexpr(1)
_FLOAT8 = tl.constexpr(2)


@triton.jit
def _store_head(codes, scales, place, values, columns, head_dim: tl.constexpr, kept, coding: tl.constexpr):
    """One head's keys or values at `place`, counted in heads, where `kept`; `kv_blocks.encoded` is the same in torch.

    e4m3 is made of bits, since not all GPUs have it: to the nearest, ties to even, below 2^-6 in steps of 2^-9.
    """
    target = codes + place * head_dim + columns
    if coding == _AS_THEY_COME:
        tl.store(target, values, mask=kept)
    else:
        wide = values.to(tl.float32)
        greatest = 127.0 if coding == _INT8 else 448.0
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), axis=0), greatest), 1e-30)
        parts = tl.div_rn(wide, scale)
        if coding == _INT8:
            made = (parts + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        else:
            signed = parts.to(tl.int32, bitcast=True)
            size = tl.abs(parts)
            bits = signed & 0x7FFFFFFF
            large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
            small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
            made = (tl.where(size < 0.015625, small, large) | ((signed >> 24) & 0x80)).to(tl.uint8)
        tl.store(target, made, mask=kept)
        tl.store(scales + place + columns * 0, scale, mask=kept & (columns == 0))


@triton.jit
def _load_heads(codes, tokens, columns, mask, dtype: tl.constexpr, coding: tl.constexpr):
    """Keys or values [tokens, columns] in `dtype`; codes without their scales, which it holds exactly."""
    values = tl.load(codes + tokens[:, None] + columns[None, :], mask=mask, other=0)
    if coding == _FLOAT8:  # a half has the same bits in other places
        wide = values.to(tl.int32)
        bits = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.uint16)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return values.to(dtype)


@triton.jit(**VARYING)
def _rope_and_store(
    heads, turned, blocks, scales, slots, cosines, sines, norm, eps,
    stride_token, stride_block, stride_scales, num_heads, num_kv_heads, width, block_size,
    head_dim: tl.constexpr, padded_dim: tl.constexpr, is_turned: tl.constexpr, coding: tl.constexpr,
    num_parts: tl.constexpr, is_normed: tl.constexpr,
):  # fmt: skip
    """One token and one head: a query is turned into `turned`, a key turned into its slot, a value copied beside it.

    `num_parts` 1: keys contain the values. With `is_normed` queries and keys are normalised first, and rounded as the
    single steps would.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, padded_dim)
    is_column = columns < head_dim
    source = heads + token * stride_token + head * head_dim
    values = tl.load(source + columns, mask=is_column, other=0.0)
    scale = 1.0
    if is_normed:
        wide = values.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / head_dim + eps)
        norm += head * head_dim
        weight = tl.load(norm + columns, mask=is_column, other=0.0)
        values = ((wide * scale).to(values.dtype) * weight).to(values.dtype)
    if is_turned:
        is_rotated = columns < width
        half = width // 2
        partners = tl.where(columns < half, columns + half, columns - half)
        others = tl.load(source + partners, mask=is_rotated, other=0.0)
        if is_normed:
            weight = tl.load(norm + partners, mask=is_rotated, other=0.0)
            others = ((others.to(tl.float32) * scale).to(others.dtype) * weight).to(others.dtype)
        others = others.to(tl.float32)
        cosine = tl.load(cosines + token * width + columns, mask=is_rotated, other=1.0).to(tl.float32)
        sine = tl.load(sines + token * width + columns, mask=is_rotated, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) * cosine + others * sine).to(values.dtype)
    if head < num_heads:
        tl.store(turned + (token * num_heads + head) * head_dim + columns, values, mask=is_column)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        kept = columns < tl.where(slot >= 0, head_dim, 0)
        place = slot % block_size * num_parts * num_kv_heads + head - num_heads
        block = slot // block_size
        target, own_scales = blocks + block * stride_block, scales + block * stride_scales
        _store_head(target, own_scales, place, values, columns, head_dim, kept, coding)
        if num_parts == 2:
            beside = tl.load(source + num_kv_heads * head_dim + columns, mask=is_column, other=0.0)
            _store_head(target, own_scales, place + num_kv_heads, beside, columns, head_dim, kept, coding)


@triton.jit
def _bounded(scores, softcap: tl.constexpr):
    """softcap * tanh(scores / softcap), as 2 * sigmoid(2x) - 1; nothing if there is none."""
    if softcap > 0:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit(**VARYING)
def _decode(
    queries, blocks, scales, tables, lens, sinks, sums, maxima, totals, output,
    stride_query, stride_table, stride_block, stride_scales, num_kv_heads, scale, num_splits,
    is_split: tl.constexpr, group: tl.constexpr, padded_group: tl.constexpr,
    head_dim: tl.constexpr, padded_dim: tl.constexpr,
    block_size: tl.constexpr, tile: tl.constexpr, window: tl.constexpr, softcap: tl.constexpr,
    has_sinks: tl.constexpr, coding: tl.constexpr,
):  # fmt: skip
    """One sequence, KV head and split: the softmax over the split's part of what the sequence's last token sees. The
    only split writes the `output`.

    It begins with the heads' sinks, if they have any, in the first split alone.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens + row)
    begin = 0
    if window > 0:
        begin = tl.maximum(length - window, 0) // tile * tile
    num_tiles = tl.cdiv(length - begin, tile)
    per_split = tl.cdiv(num_tiles, num_splits)
    first = begin + split * per_split * tile
    last = tl.minimum(begin + (split + 1) * per_split * tile, length)

    members = tl.arange(0, padded_group)
    columns = tl.arange(0, padded_dim)
    is_query = (members < group)[:, None] & (columns < head_dim)[None, :]
    heads = kv_head * group + members
    query = tl.load(
        queries + row * stride_query + heads[:, None] * head_dim + columns[None, :], mask=is_query, other=0.0
    )
    best = tl.full([padded_group], float("-inf"), tl.float32)
    total = tl.zeros([padded_group], tl.float32)
    if has_sinks:
        begins = members < tl.where(split == 0, group, 0)
        best = tl.load(sinks + heads, mask=begins, other=float("-inf")) * _LOG2_E
        total = tl.where(begins, 1.0, 0.0)
    mixed = tl.zeros([padded_group, padded_dim], tl.float32)
    for start in range(first, last, tile):
        positions = start + tl.arange(0, tile)
        is_seen = positions < last
        ids = tl.load(tables + row * stride_table + positions // block_size, mask=is_seen, other=0).to(tl.int64)
        if window > 0:
            is_seen = is_seen & (positions >= length - window)
        places = positions % block_size * 2 * num_kv_heads + kv_head
        tokens = ids * stride_block + places * head_dim
        is_there = is_seen[:, None] & (columns < head_dim)[None, :]
        keys = _load_heads(blocks, tokens, columns, is_there, query.dtype, coding)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if coding != _AS_THEY_COME:
            scores *= tl.load(scales + ids * stride_scales + places, mask=is_seen, other=0.0)[None, :]
        scores = _bounded(scores, softcap) * _LOG2_E
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # A tile that lies before the window as a whole has nothing to compare with.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(best - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        if coding != _AS_THEY_COME:
            places += num_kv_heads
            weights *= tl.load(scales + ids * stride_scales + places, mask=is_seen, other=0.0)[None, :]
        values = _load_heads(blocks + num_kv_heads * head_dim, tokens, columns, is_there, query.dtype, coding)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = higher
    place = row * num_kv_heads * group + heads
    if is_split:
        place = place * num_splits + split
        tl.store(sums + place[:, None] * head_dim + columns[None, :], mixed, mask=is_query)
        tl.store(maxima + place, best, mask=members < group)
        tl.store(totals + place, total, mask=members < group)
    else:
        result = mixed / tl.maximum(total, 1e-30)[:, None]
        tl.store(
            output + place[:, None] * head_dim + columns[None, :], result.to(output.dtype.element_ty), mask=is_query
        )


@triton.jit(**VARYING)
def _merge(
    sums, maxima, totals, output, num_splits,
    padded_splits: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr,
):  # fmt: skip
    """The splits of one sequence and head become one softmax."""
    place = tl.program_id(0)
    splits, columns = tl.arange(0, padded_splits), tl.arange(0, padded_dim)
    is_split = splits < num_splits
    best = tl.load(maxima + place * num_splits + splits, mask=is_split, other=float("-inf"))
    total = tl.load(totals + place * num_splits + splits, mask=is_split, other=0.0)
    parts = tl.load(
        sums + (place * num_splits + splits)[:, None] * head_dim + columns[None, :],
        mask=is_split[:, None] & (columns < head_dim)[None, :],
        other=0.0,
    )
    highest = tl.max(best, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # padding of a captured batch has no token
    weights = tl.exp2(best - highest)
    whole = tl.maximum(tl.sum(total * weights, axis=0), 1e-30)
    result = tl.sum(parts * weights[:, None], axis=0) / whole
    tl.store(output + place * head_dim + columns, result.to(output.dtype.element_ty), mask=columns < head_dim)


@triton.jit(**VARYING)
def _prefill(
    queries, blocks, scales, tables, tile_rows, tile_starts, row_starts, num_queries, lens, sinks, output,
    stride_query, stride_table, stride_block, stride_scales, num_kv_heads, scale,
    group: tl.constexpr, padded_group: tl.constexpr, tile_queries: tl.constexpr,
    head_dim: tl.constexpr, padded_dim: tl.constexpr, block_size: tl.constexpr, tile: tl.constexpr,
    window: tl.constexpr, softcap: tl.constexpr, has_sinks: tl.constexpr, coding: tl.constexpr,
):  # fmt: skip
    """Some queries of one sequence, with the heads of one group, over all of the sequence that they see."""
    row = tl.load(tile_rows + tl.program_id(0))
    start_query = tl.load(tile_starts + tl.program_id(0))
    kv_head = tl.program_id(1)
    count, length = tl.load(num_queries + row), tl.load(lens + row)
    first_token = tl.load(row_starts + row)

    lanes = tl.arange(0, tile_queries * padded_group)
    columns = tl.arange(0, padded_dim)
    query_index = start_query + lanes // padded_group
    heads = kv_head * group + lanes % padded_group
    is_lane = (query_index < count) & (lanes % padded_group < group)
    is_query = is_lane[:, None] & (columns < head_dim)[None, :]
    tokens_of_queries = first_token + query_index
    query = tl.load(
        queries + tokens_of_queries[:, None] * stride_query + heads[:, None] * head_dim + columns[None, :],
        mask=is_query,
        other=0.0,
    )
    query_positions = length - count + query_index
    last = tl.minimum(length - count + start_query + tile_queries, length)
    first = 0
    if window > 0:
        first = tl.maximum(length - count + start_query - window + 1, 0) // tile * tile
    best = tl.full([tile_queries * padded_group], float("-inf"), tl.float32)
    total = tl.zeros([tile_queries * padded_group], tl.float32)
    if has_sinks:
        best = tl.load(sinks + heads, mask=is_lane, other=0.0) * _LOG2_E
        total += 1.0
    mixed = tl.zeros([tile_queries * padded_group, padded_dim], tl.float32)
    for start in range(first, last, tile):
        positions = start + tl.arange(0, tile)
        is_held = positions < last
        ids = tl.load(tables + row * stride_table + positions // block_size, mask=is_held, other=0).to(tl.int64)
        places = positions % block_size * 2 * num_kv_heads + kv_head
        tokens = ids * stride_block + places * head_dim
        is_there = is_held[:, None] & (columns < head_dim)[None, :]
        keys = _load_heads(blocks, tokens, columns, is_there, query.dtype, coding)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if coding != _AS_THEY_COME:
            scores *= tl.load(scales + ids * stride_scales + places, mask=is_held, other=0.0)[None, :]
        scores = _bounded(scores, softcap) * _LOG2_E
        is_seen = positions[None, :] <= query_positions[:, None]
        if window > 0:
            is_seen = is_seen & (positions[None, :] > query_positions[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(best - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        if coding != _AS_THEY_COME:
            places += num_kv_heads
            weights *= tl.load(scales + ids * stride_scales + places, mask=is_held, other=0.0)[None, :]
        values = _load_heads(blocks + num_kv_heads * head_dim, tokens, columns, is_there, query.dtype, coding)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        best = higher
    result = mixed / tl.maximum(total, 1e-30)[:, None]
    place = (tokens_of_queries[:, None] * num_kv_heads * group + heads[:, None]) * head_dim + columns[None, :]
    tl.store(output + place, result.to(output.dtype.element_ty), mask=is_query)


def _coded(blocks: torch.Tensor, scales: torch.Tensor | None) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How blocks are kept, as the kernels take them, and scales or what stands for them."""
    if scales is None:
        return 0, blocks, blocks
    return (1, blocks, scales) if blocks.dtype == torch.int8 else (2, blocks.view(torch.uint8), scales)


def rows_of_tile(head_dim: int, dtype: torch.dtype) -> int:
    """Of a tile of prefill: queries times the heads of a group, a power of two.

    With as many keys as `keys_of_tile` says, each program fits the 99 KiB of shared memory that small GPUs have.
    """
    if dtype.itemsize == _FLOAT32_BYTES:
        return 32 if head_dim <= 128 else _LEAST_ROWS
    return 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32


def keys_of_tile(head_dim: int, dtype: torch.dtype) -> int:
    """A power of two."""
    wide = head_dim * dtype.itemsize
    if dtype.itemsize == _FLOAT32_BYTES:
        wide *= 2
    return 64 if wide <= 256 else 32 if wide <= 512 else 16


def rope_and_store(
    heads: torch.Tensor,
    blocks: torch.Tensor,
    slots: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    scales: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """`heads` [tokens, heads + parts * kv heads, head_dim]; keys and values go to `slots` [tokens] (-1: nowhere).

    `rotation`: cosines and sines [tokens, 1, width], the sines of the first half negated. `norm`: weights [heads + kv
    heads, head_dim] without gaps and epsilon, by which queries and keys are normalised before they are turned. Returns
    the queries, turned.
    """
    num_tokens, num_all, head_dim = heads.shape
    num_parts, num_kv_heads = blocks.shape[2:4]
    num_heads = num_all - num_parts * num_kv_heads
    turned = torch.empty(num_tokens, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    cosines, sines = rotation if rotation is not None else (heads, heads)
    weights, eps = norm if norm is not None else (heads, 0.0)
    coding, kept, scales = _coded(blocks, scales)
    # One warp: all loads of a head come before its stores.
    _rope_and_store[(num_tokens, num_heads + num_kv_heads)](
        heads, turned, kept, scales, slots, cosines, sines, weights, eps,
        heads.stride(0), blocks.stride(0), scales.stride(0), num_heads, num_kv_heads,
        cosines.shape[-1] if rotation is not None else 0, blocks.shape[1],
        head_dim=head_dim, padded_dim=triton.next_power_of_2(head_dim), is_turned=rotation is not None,
        coding=coding, num_parts=num_parts, is_normed=norm is not None, num_warps=1,
    )  # fmt: skip
    return turned


def decode_attention(
    queries: torch.Tensor,
    blocks: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    *,
    scale: float,
    num_splits: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last token of each sequence over its `lens` tokens; a length of 0 gives zeros. [sequences, heads * head_dim]

    `num_splits`: the parts into which a sequence is cut, for different processors. `sinks` [heads] in float32. `output`
    is where the result goes, if that is given.
    """
    num_rows, num_heads, head_dim = queries.shape
    block_size, num_kv_heads = blocks.shape[1], blocks.shape[3]
    group = num_heads // num_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    padded_group = max(_LEAST_ROWS, triton.next_power_of_2(group))
    if output is None:
        output = torch.empty(num_rows, num_heads * head_dim, dtype=queries.dtype, device=queries.device)
    sums = maxima = totals = output
    if num_splits > 1:
        sums, maxima, totals = new_splits(queries, num_splits, head_dim)
    coding, kept, scales = _coded(blocks, scales)
    _decode[(num_rows, num_kv_heads, num_splits)](
        queries, kept, scales, tables, lens, queries if sinks is None else sinks, sums, maxima, totals, output,
        queries.stride(0), tables.stride(0), blocks.stride(0), scales.stride(0), num_kv_heads, scale, num_splits,
        is_split=num_splits > 1, group=group, padded_group=padded_group,
        head_dim=head_dim, padded_dim=padded_dim, block_size=block_size, tile=keys_of_tile(head_dim, queries.dtype),
        window=window or 0, softcap=softcap or 0.0, has_sinks=sinks is not None, coding=coding,
        num_warps=4 if padded_group * padded_dim <= _MOST_OF_FOUR_WARPS else 8, num_stages=3,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits(sums, maxima, totals, output)
    return output


def new_splits(queries: torch.Tensor, num_splits: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for what `merge_splits` takes, of queries [sequences, heads, head_dim]."""
    places = (*queries.shape[:2], num_splits)
    sums = torch.empty(*places, width, dtype=torch.float32, device=queries.device)
    maxima = torch.empty(places, dtype=torch.float32, device=queries.device)
    return sums, maxima, torch.empty_like(maxima)


def merge_splits(sums: torch.Tensor, maxima: torch.Tensor, totals: torch.Tensor, output: torch.Tensor) -> None:
    """`sums` [sequences, heads, splits, width], of weights whose base are `maxima` and whose sums are `totals`, become
    `output` [sequences, heads * width]."""
    num_rows, num_heads, num_splits, width = sums.shape
    _merge[(num_rows * num_heads,)](
        sums, maxima, totals, output, num_splits,
        padded_splits=triton.next_power_of_2(num_splits), head_dim=width,
        padded_dim=max(_LEAST_ROWS, triton.next_power_of_2(width)), num_warps=2 if width <= 256 else 4,
    )  # fmt: skip


def prefill_attention(
    queries: torch.Tensor,
    blocks: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    *,
    num_queries: torch.Tensor,
    row_starts: torch.Tensor,
    tile_rows: torch.Tensor,
    tile_starts: torch.Tensor,
    tile_queries: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last `num_queries` tokens of each sequence, which begin at row `row_starts` of `queries`, causally.

    Tile i has `tile_queries` queries of sequence `tile_rows[i]` from its query `tile_starts[i]` on. `sinks` [heads]
    in float32. `output` is where the result goes, if that is given.
    """
    num_tokens, num_heads, head_dim = queries.shape
    block_size, num_kv_heads = blocks.shape[1], blocks.shape[3]
    group = num_heads // num_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    padded_group = triton.next_power_of_2(group)
    if output is None:
        output = torch.empty(num_tokens, num_heads * head_dim, dtype=queries.dtype, device=queries.device)
    coding, kept, scales = _coded(blocks, scales)
    _prefill[(tile_rows.shape[0], num_kv_heads)](
        queries, kept, scales, tables, tile_rows, tile_starts, row_starts, num_queries, lens,
        queries if sinks is None else sinks, output,
        queries.stride(0), tables.stride(0), blocks.stride(0), scales.stride(0), num_kv_heads, scale,
        group=group, padded_group=padded_group, tile_queries=tile_queries, head_dim=head_dim,
        padded_dim=padded_dim, block_size=block_size, tile=keys_of_tile(head_dim, queries.dtype),
        window=window or 0, softcap=softcap or 0.0, has_sinks=sinks is not None, coding=coding,
        num_warps=4 if tile_queries * padded_group * padded_dim <= _MOST_OF_FOUR_WARPS else 8, num_stages=2,
    )  # fmt: skip
    return output
