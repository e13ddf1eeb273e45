"""Attention on GPUs, by our own Triton kernels."""

from __future__ import annotations

import numpy as np
import torch

from . import triton_kernels
from .kv_blocks import KvBlocks
from .paged import (
    AttentionBatch,
    AttentionSpec,
    DeviceInputs,
    IntArray,
    PrefillTiles,
    Rotation,
    copied_together,
    kept_of,
)

# Rows of a tile of prefill: queries times the heads of a group.
_TILE_ROWS = 128
_MOST_SPLITS = 32


class TritonAttention:
    """`num_processors`: of the device; a small batch of long sequences is split until all of them have work."""

    is_capturable = True

    def __init__(self, blocks: KvBlocks, spec: AttentionSpec, *, num_processors: int) -> None:
        self._layers = blocks.layers
        self._scales = blocks.scales if blocks.layout.pairs.num_scales else [None] * len(self._layers)
        self._device = blocks.device
        self._spec = spec
        self._num_kv_heads = blocks.layout.pairs.num_heads
        self._num_processors = num_processors
        group = 1 << (spec.num_heads // self._num_kv_heads - 1).bit_length()
        self._tile_queries = max(1, _TILE_ROWS // group)

    def prepare(self, batch: AttentionBatch) -> DeviceInputs:
        """One copy to the device, from memory that it may read while the host goes on."""
        arrays = [batch.slots, batch.lens, batch.block_tables]
        has_prefill = batch.num_decodes < len(batch.lens)
        if has_prefill:
            arrays += self._prefill_arrays(batch)
        slots, lens, tables, *prefill = copied_together(arrays, self._device)
        return DeviceInputs(
            batch.num_decodes,
            slots,
            lens,
            tables.view(len(batch.lens), -1),
            PrefillTiles(*prefill) if has_prefill else None,
        )

    def read(self, layer: int, block_ids: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv heads, tokens, head_dim] of the blocks."""
        return kept_of(self._layers[layer], block_ids)

    def __call__(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, inputs: DeviceInputs) -> torch.Tensor:
        heads = torch.cat((queries, kv.flatten(1, 2)), dim=1)
        return self.rope_and_attend(layer, heads, None, inputs)

    def rope_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation | None, inputs: DeviceInputs
    ) -> torch.Tensor:
        blocks, scales, spec = self._layers[layer], self._scales[layer], self._spec
        tables = None if rotation is None else (rotation.cosines, rotation.sines)
        queries = triton_kernels.rope_and_store(heads, blocks, inputs.slots, tables, scales)
        window, sinks = spec.windows[layer], spec.sinks_of(layer)
        outputs = []
        count = inputs.num_decodes
        if count:
            outputs.append(
                triton_kernels.decode_attention(
                    queries[:count],
                    blocks,
                    inputs.tables[:count],
                    inputs.lens[:count],
                    scale=spec.scale,
                    num_splits=self._num_splits(count),
                    window=window,
                    softcap=spec.softcap,
                    sinks=sinks,
                    scales=scales,
                )
            )
        if inputs.prefill is not None:
            prefill = inputs.prefill
            outputs.append(
                triton_kernels.prefill_attention(
                    queries[count:],
                    blocks,
                    inputs.tables[count:],
                    inputs.lens[count:],
                    num_queries=prefill.num_queries,
                    row_starts=prefill.row_starts,
                    tile_rows=prefill.tile_rows,
                    tile_starts=prefill.tile_starts,
                    tile_queries=self._tile_queries,
                    scale=spec.scale,
                    window=window,
                    softcap=spec.softcap,
                    sinks=sinks,
                    scales=scales,
                )
            )
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _num_splits(self, num_rows: int) -> int:
        """Depends only on the number of rows, so that a captured step stays valid while its sequences grow."""
        wanted = -(-2 * self._num_processors // (num_rows * self._num_kv_heads))
        return max(1, min(wanted, _MOST_SPLITS))

    def _prefill_arrays(self, batch: AttentionBatch) -> list[IntArray]:
        num_queries = batch.num_queries[batch.num_decodes :]
        num_tiles = -(-num_queries // self._tile_queries)
        tile_rows = np.repeat(np.arange(len(num_queries)), num_tiles)
        firsts = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
        tile_starts = (np.arange(len(tile_rows)) - firsts) * self._tile_queries
        return [num_queries, np.cumsum(num_queries) - num_queries, tile_rows, tile_starts]
