"""Attention over gathered blocks by torch's own operations: the CPU's path, and the reference.

Prefill goes sequence by sequence through SDPA; a fresh prompt attends to its own keys without touching the cache.
Decode goes in tiles of sequences of similar length, whose keys and values are gathered into a buffer that stays in the
CPU's cache, and multiplied by two batched products (in float32: SDPA's kernel takes twice as long on two threads).

What a block has of a layer is used as pages, one for its keys and one for its values of each KV head: [parts, KV heads,
block size, head_dim]. So what is gathered of a sequence's head is one matrix. Keys that contain the values are the one
part that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from .kv_blocks import KvBlocks, decoded, encoded, read_pages, write_pages
from .paged import AttentionBatch, AttentionSpec, IntArray, Rotation

# Gathered keys and values of a tile: about an L2 cache. Measured: 1 to 3 MiB are equal, 100 MiB takes twice as long.
_TILE_BYTES = 2 << 20
# How much padding a tile may gather: reading more takes longer than the calls of another tile.
_PADDING_BYTES = 384 << 10
# A prefill after cached tokens attends in pieces of this many rows, each with a mask.
_PIECE_ROWS = 256


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Rows [start, stop) of the decodes: `page_ids` [parts * matrices * blocks], `mask` [matrices, 1, tokens].

    A matrix is a row's KV head, a page is a row of `SdpaAttention._pages`.
    """

    start: int
    stop: int
    page_ids: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rows [start, stop) of the batch: positions from `num_past` on. `page_ids` is None if nothing is cached yet.

    Else it has the pages that the first query may see, and `first` is the position where they begin.
    """

    start: int
    stop: int
    num_past: int
    page_ids: torch.Tensor | None
    first: int


@dataclass(frozen=True, slots=True)
class SdpaInputs:
    """One step, prepared for all layers; tiles and prefills are by a layer's window.

    `cells` [tokens * parts * KV heads]: where each token's keys and values go, rows of `SdpaAttention._cells`. Without
    it nothing is kept.
    """

    cells: torch.Tensor | None
    num_decodes: int
    tiles: dict[int | None, list[DecodeTile]]
    prefills: dict[int | None, list[Prefill]]


class SdpaAttention:
    def __init__(self, blocks: KvBlocks, spec: AttentionSpec) -> None:
        group, num_layers = blocks.layout.group, len(blocks.layout.group.layers)
        self._num_blocks = blocks.num_blocks
        self._block_size = blocks.block_size
        self._scale = spec.scale
        self._softcap = spec.softcap
        self._windows = spec.windows
        # By KV head and query head of its group.
        self._sinks = [_grouped(spec.sinks_of(layer), group.num_heads) for layer in range(num_layers)]
        self._device = blocks.device
        self._group = group
        self._dtype = group.heads_dtype
        self._token_bytes = replace(group, dtype=group.heads_dtype, num_scales=0).layer_bytes(1)
        self._num_kv_heads = group.num_heads
        self._head_dim = group.key_width
        # Of each layer, all pages from its first one on: those of a block are as far apart in all layers.
        num_pages = group.num_parts * self._num_kv_heads
        self._pages = [blocks.pages[layer * num_pages :] for layer in range(num_layers)]
        self._pages_per_block = num_layers * num_pages
        # Pages of a block in a layer, counted from its own first.
        self._page_numbers = np.arange(num_pages)
        self._gathered = torch.empty(0, dtype=self._dtype, device=self._device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def prepare(self, batch: AttentionBatch) -> SdpaInputs:
        windows = set(self._windows)
        return SdpaInputs(
            cells=torch.from_numpy(self._cells_of(batch.slots)).to(self._device),
            num_decodes=batch.num_decodes,
            tiles={window: self._decode_tiles(batch, window) for window in windows},
            prefills={window: self._prefills(batch, window) for window in windows},
        )

    def prepare_fresh(self, lengths: Sequence[int]) -> SdpaInputs:
        """Of sequences that are computed as wholes, one behind the other and without blocks."""
        windows = set(self._windows)
        stops = list(accumulate(lengths))
        whole = [Prefill(stop - length, stop, 0, None, 0) for length, stop in zip(lengths, stops, strict=True)]
        return SdpaInputs(None, 0, {window: [] for window in windows}, dict.fromkeys(windows, whole))

    def __call__(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, inputs: SdpaInputs) -> torch.Tensor:
        """`queries` [tokens, heads, head_dim], `kv` [tokens, parts, kv heads, head_dim] -> [tokens, heads' outputs]."""
        if inputs.cells is not None:
            self._keep(layer, kv, inputs.cells)
        window = self._windows[layer]
        tiles, prefills = inputs.tiles[window], inputs.prefills[window]
        outputs = [self._decode(layer, queries, tile) for tile in tiles]
        outputs += [self.prefill(layer, queries, kv, prefill, window) for prefill in prefills]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def rope_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation | None, inputs: SdpaInputs
    ) -> torch.Tensor:
        num_kv_heads, num_parts = self._num_kv_heads, self._group.num_parts
        num_heads = heads.shape[1] - num_parts * num_kv_heads
        if rotation is not None:
            rotation.apply_rope(heads[:, : num_heads + num_kv_heads])
        kv = heads[:, num_heads:].unflatten(1, (num_parts, num_kv_heads))
        return self(layer, heads[:, :num_heads], kv, inputs)

    def _keep(self, layer: int, kv: torch.Tensor, cells: torch.Tensor) -> None:
        values, pages = kv.reshape(-1, self._head_dim), self._pages[layer]
        if self._group.num_scales:
            write_pages(pages, cells, values, self._group)
        else:
            pages.view(-1, self._head_dim).index_copy_(0, cells, values)

    def read(self, layer: int, block_ids: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv heads, tokens, head_dim] of the blocks, valid until the next gather."""
        return self._gather(layer, self._page_ids(block_ids[None]), self._num_kv_heads)

    def kept(self, layer: int) -> torch.Tensor:
        """The keys and values of each slot: [slots, parts, kv heads, head_dim], a copy."""
        firsts = torch.arange(self._num_blocks, device=self._device) * self._pages_per_block
        numbers = torch.from_numpy(self._page_numbers).to(self._device)
        pages = self._pages[layer][(firsts[:, None] + numbers).ravel()]
        if self._group.num_scales:
            pages = read_pages(pages, self._group)
        pages = pages.view(-1, self._group.num_parts, self._num_kv_heads, self._block_size, self._head_dim)
        return pages.permute(0, 3, 1, 2, 4).flatten(0, 1)

    def _decode(self, layer: int, queries: torch.Tensor, tile: DecodeTile) -> torch.Tensor:
        """A token's query heads that share a KV head attend as if they were several queries."""
        rows = tile.stop - tile.start
        matrices = rows * self._num_kv_heads
        keys, values = self._gather(layer, tile.page_ids, matrices)
        tiled = queries[tile.start : tile.stop].reshape(matrices, -1, self._head_dim)
        sinks = self._sinks[layer]
        if self._dtype is torch.float32 and self._softcap is None and sinks is None:
            scores = torch.baddbmm(tile.mask, tiled, keys.transpose(1, 2), alpha=self._scale)
            return torch.bmm(scores.softmax(dim=-1), values).view(rows, -1)
        if sinks is not None:
            sinks = sinks.repeat(rows, 1)[:, None, None, :, None]
        mixed = self._attend(tiled[:, None], keys[:, None], values[:, None], tile.mask[:, None], sinks)
        return mixed.reshape(rows, -1)

    def prefill(
        self, layer: int, queries: torch.Tensor, kv: torch.Tensor, prefill: Prefill, window: int | None
    ) -> torch.Tensor:
        rows = prefill.stop - prefill.start
        own = queries[prefill.start : prefill.stop].transpose(0, 1)[None]
        sinks = self._sinks[layer]
        if sinks is not None:
            sinks = sinks[None, :, :, None, None]
        if prefill.page_ids is None:
            fresh = self.as_kept(kv[prefill.start : prefill.stop]).permute(1, 2, 0, 3)[:, None]
            keys, values = self._parts(fresh)
            is_whole = window is None or rows <= window
            if is_whole and self._softcap is None and sinks is None and not self._group.shared_width:
                return self._attend(own, keys, values, None, None, is_causal=True)[0].transpose(0, 1).reshape(rows, -1)
        else:
            keys, values = (part[None] for part in self._gather(layer, prefill.page_ids, self._num_kv_heads))
        pieces = []
        for piece in range(0, rows, _PIECE_ROWS):
            stop = min(piece + _PIECE_ROWS, rows)
            position = prefill.num_past + piece
            begin = prefill.first if window is None else max(prefill.first, position - window + 1)
            span = slice(begin - prefill.first, prefill.num_past + stop - prefill.first)
            mask = self._causal_mask(window, stop - piece, position - begin)
            pieces.append(self._attend(own[:, :, piece:stop], keys[:, :, span], values[:, :, span], mask, sinks))
        output = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        return output[0].transpose(0, 1).reshape(rows, -1)

    def kept_of(self, layer: int, chunk: Prefill) -> torch.Tensor:
        """Of latent attention, what the blocks of a chunk hold of its tokens [tokens, width], until the next gather."""
        assert chunk.page_ids is not None, "a fresh chunk has its own rows"
        return self._gather(layer, chunk.page_ids, 1)[0][0, : chunk.num_past + chunk.stop - chunk.start]

    def attend_long(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: Prefill
    ) -> torch.Tensor:
        """A chunk's queries [rows, heads, width] over all keys and values [tokens, heads, width], each head its own."""
        own, keys, values = (each.transpose(0, 1)[None] for each in (queries, keys, values))
        if not chunk.num_past:
            mixed = F.scaled_dot_product_attention(own, keys, values, is_causal=True, scale=self._scale)
            return mixed[0].transpose(0, 1)
        pieces, rows = [], own.shape[2]
        for piece in range(0, rows, _PIECE_ROWS):
            stop = min(piece + _PIECE_ROWS, rows)
            end = chunk.num_past + stop
            mask = self._causal_mask(None, stop - piece, chunk.num_past + piece)
            pieces.append(
                F.scaled_dot_product_attention(
                    own[:, :, piece:stop], keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=self._scale
                )
            )
        return torch.cat(pieces, dim=2)[0].transpose(0, 1)

    def as_kept(self, kv: torch.Tensor) -> torch.Tensor:
        """What a later step will read, so that a prompt whose beginning is found in the cache gives the same."""
        if not self._group.num_scales:
            return kv
        return decoded(*encoded(kv, self._group.dtype), self._dtype)

    def _gather(self, layer: int, page_ids: torch.Tensor, matrices: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [matrices, tokens, head_dim], valid until the next gather."""
        pages = self._pages[layer]
        if self._group.num_scales:
            return self._parts(read_pages(pages[page_ids], self._group).view(2, matrices, -1, self._head_dim))
        size = page_ids.shape[0] * pages.shape[1]
        if self._gathered.numel() < size:  # kept: fresh memory of this size costs more than the copy
            self._gathered = torch.empty(size, dtype=self._dtype, device=self._device)
        out = self._gathered[:size].view(page_ids.shape[0], -1)
        torch.index_select(pages, 0, page_ids, out=out)
        return self._parts(out.view(self._group.num_parts, matrices, -1, self._head_dim))

    def _parts(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of [parts, ..., head_dim]."""
        return kept[0], self._group.values_of(kept[0]) if self._group.shared_width else kept[1]

    def _cells_of(self, slots: IntArray) -> IntArray:
        """Of each slot's keys and values by head."""
        firsts = slots // self._block_size * (self._pages_per_block * self._block_size) + slots % self._block_size
        return (firsts[:, None] + self._page_numbers * self._block_size).ravel()

    def _page_ids(self, block_ids: IntArray) -> torch.Tensor:
        """Of [rows, blocks], the pages by keys or values, row, head, block."""
        numbers = self._page_numbers.reshape(self._group.num_parts, 1, -1, 1)
        return torch.from_numpy((block_ids[:, None] * self._pages_per_block + numbers).ravel()).to(self._device)

    def _attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """[rows, heads, queries, head_dim] over [rows, kv heads, tokens, head_dim]; `sinks` as in `_attend_in_full`."""
        if self._group.shared_width:
            assert self._softcap is None, "latent attention has no soft cap"
            assert sinks is None, "latent attention has no sinks"
            return _attend_through_one_head(queries, keys, values, mask, scale=self._scale)
        if self._softcap is None and sinks is None:
            return F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=is_causal,
                scale=self._scale,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
        return _attend_in_full(queries, keys, values, mask, sinks, scale=self._scale, softcap=self._softcap)

    def _causal_mask(self, window: int | None, rows: int, num_past: int) -> torch.Tensor:
        """[rows, num_past + rows], added to scores: row i stands at column num_past + i and sees what is before it.

        All are cuts of one template per window, in which column `past` is where row 0 stands.
        """
        template = self._masks.get(window)
        rows_held = 0 if template is None else template.shape[0]
        past = 0 if template is None else template.shape[1] - rows_held
        if template is None or rows > rows_held or num_past > past:
            rows_held, past = max(rows, rows_held, _PIECE_ROWS), max(num_past, 2 * past)
            distance = torch.arange(-past, rows_held) - torch.arange(rows_held)[:, None]
            is_seen = distance <= 0 if window is None else (distance <= 0) & (distance > -window)
            template = torch.zeros(rows_held, past + rows_held, dtype=self._dtype)
            template = template.masked_fill_(~is_seen, float("-inf")).to(self._device)
            self._masks[window] = template
        mask = template[:rows, past - num_past : past + rows]
        # Kernels of GPUs refuse a mask that begins between aligned addresses, and torch moves none for that reason.
        return mask if self._device.type == "cpu" else mask.clone()

    def _decode_tiles(self, batch: AttentionBatch, window: int | None) -> list[DecodeTile]:
        lens = batch.lens[: batch.num_decodes]
        if not len(lens):
            return []
        firsts = _first_blocks(lens - 1, window, self._block_size)
        num_blocks = -(-lens // self._block_size) - firsts
        order_start = 0
        tiles = []
        for stop in self._tile_stops(num_blocks):
            tiles.append(
                self._decode_tile(batch, order_start, stop, firsts, int(num_blocks[order_start:stop].max()), window)
            )
            order_start = stop
        return tiles

    def _tile_stops(self, num_blocks: IntArray) -> list[int]:
        """Where tiles end: before they outgrow the CPU's cache, or are padded too much."""
        block_bytes = self._token_bytes * self._block_size
        stops, start, most, used = [], 0, 0, 0
        for row, count in enumerate(num_blocks.tolist()):
            most, used = max(most, count), used + count
            size = (row + 1 - start) * most
            if row > start and (size * block_bytes > _TILE_BYTES or (size - used) * block_bytes > _PADDING_BYTES):
                stops.append(row)
                start, most, used = row, count, count
        return [*stops, len(num_blocks)]

    def _decode_tile(
        self, batch: AttentionBatch, start: int, stop: int, firsts: IntArray, width: int, window: int | None
    ) -> DecodeTile:
        columns = firsts[start:stop, None] + np.arange(width)
        last = batch.block_tables.shape[1] - 1
        block_ids = np.take_along_axis(batch.block_tables[start:stop], np.minimum(columns, last), axis=1)
        positions = firsts[start:stop, None] * self._block_size + np.arange(width * self._block_size)
        lens = batch.lens[start:stop, None]
        is_seen = positions < lens if window is None else (positions < lens) & (positions >= lens - window)
        mask = np.where(is_seen, np.float32(0), np.float32("-inf")).repeat(self._num_kv_heads, axis=0)
        return DecodeTile(
            start,
            stop,
            self._page_ids(block_ids),
            torch.from_numpy(mask)[:, None].to(self._device, self._dtype),
        )

    def long_prefills(self, batch: AttentionBatch, most_queries: int) -> dict[int | None, list[Prefill]]:
        """By window, those of more than `most_queries`."""
        return {
            window: [each for each in self._prefills(batch, window) if each.stop - each.start > most_queries]
            for window in set(self._windows)
        }

    def _prefills(self, batch: AttentionBatch, window: int | None) -> list[Prefill]:
        prefills = []
        start = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.lens)):
            num_queries, length = int(batch.num_queries[row]), int(batch.lens[row])
            num_past = length - num_queries
            page_ids, first = None, 0
            if num_past:
                first_block = int(_first_blocks(np.array([num_past]), window, self._block_size)[0])
                first = first_block * self._block_size
                ids = batch.block_tables[row, first_block : -(-length // self._block_size)]
                page_ids = self._page_ids(ids[None])
            prefills.append(Prefill(start, start + num_queries, num_past, page_ids, first))
            start += num_queries
        return prefills


def _first_blocks(positions: IntArray, window: int | None, block_size: int) -> IntArray:
    """The first block that the query at each position sees."""
    if window is None:
        return np.zeros_like(positions)
    return np.maximum(positions - window + 1, 0) // block_size


def _grouped(sinks: torch.Tensor | None, num_kv_heads: int) -> torch.Tensor | None:
    return None if sinks is None else sinks.view(num_kv_heads, -1)


def _attend_through_one_head(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, *, scale: float
) -> torch.Tensor:
    """[rows, heads, queries, head_dim] over one KV head [rows, 1, tokens, ...]: all heads are rows of one product.

    SDPA would copy the keys for each head.
    """
    rows, num_heads, num_queries, head_dim = queries.shape
    flat = queries.reshape(rows, -1, head_dim) * scale
    scores = torch.bmm(flat, keys[:, 0].transpose(1, 2)).view(rows, num_heads, num_queries, -1)
    if mask is not None:
        scores += mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(queries.dtype).view(rows, num_heads * num_queries, -1)
    return torch.bmm(weights, values[:, 0]).view(rows, num_heads, num_queries, -1)


def _attend_in_full(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """What SDPA cannot: scores go through softcap * tanh(. / softcap) before mask and softmax (in float32), and `sinks`
    [rows or 1, kv heads, heads of a group, queries or 1, 1] are scores of one more token, whose values are zero.
    """
    rows, num_heads, num_queries, head_dim = queries.shape
    grouped = queries.reshape(rows, keys.shape[1], -1, num_queries, head_dim)
    scores = torch.matmul(grouped * (scale / (softcap or 1.0)), keys[:, :, None].transpose(3, 4))
    if softcap is not None:
        scores = scores.tanh_().mul_(softcap)
    if mask is not None:
        scores += mask if mask.dim() == 2 else mask[:, :, None]
    weights = scores.softmax(dim=-1, dtype=torch.float32)
    if sinks is not None:
        weights *= torch.sigmoid(scores.float().logsumexp(-1, keepdim=True) - sinks)
    return torch.matmul(weights.to(queries.dtype), values[:, :, None]).view(rows, num_heads, num_queries, head_dim)
