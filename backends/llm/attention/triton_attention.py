"""Attention on GPUs, by our own Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from modelserver.backend import UnsupportedError

from . import triton_kernels, triton_latent
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

_MOST_SPLITS = 32
# Pairs of a query and a head in a tile of latent attention, whose sums are 512 wide: of a decode, and of a prefill on a
# GPU whose programs have as much shared memory as the large ones, and on others.
_DECODE_LANES, _MANY_LANES, _FEW_LANES = 16, 64, 32
_LARGE_SHARED_BYTES, _SMALL_SHARED_BYTES = 160 << 10, 99 << 10


class TritonAttention:
    """`num_processors`: of the device; a small batch of long sequences is split until all of them have work."""

    fuses_norm = True

    def __init__(self, blocks: KvBlocks, spec: AttentionSpec, *, num_processors: int) -> None:
        self._layers = blocks.layers
        self._scales = blocks.scales if blocks.layout.group.num_scales else [None] * len(self._layers)
        self._device = blocks.device
        self._spec = spec
        self._num_kv_heads = blocks.layout.group.num_heads
        self._num_processors = num_processors
        # Of a head of the result.
        self._value_width = blocks.layout.group.key_width
        group = 1 << (spec.num_heads // self._num_kv_heads - 1).bit_length()
        rows = triton_kernels.rows_of_tile(blocks.layout.group.key_width, blocks.layout.group.heads_dtype)
        self._tile_queries = max(1, rows // group)

    def prepare(self, batch: AttentionBatch) -> DeviceInputs:
        tables, *copied = copied_together([batch.block_tables, *self.arrays_of(batch)], self._device)
        return self.inputs_of(batch.num_decodes, tables.view(len(batch.lens), -1), copied)

    def arrays_of(self, batch: AttentionBatch) -> list[IntArray]:
        """What `inputs_of` takes of a step, beside its block tables, on the device."""
        arrays = [batch.slots, batch.lens]
        return arrays if batch.num_decodes == len(batch.lens) else arrays + self._prefill_arrays(batch)

    def inputs_of(self, num_decodes: int, tables: torch.Tensor, arrays: Sequence[torch.Tensor]) -> DeviceInputs:
        slots, lens, *prefill = arrays
        return DeviceInputs(num_decodes, slots, lens, tables, PrefillTiles(*prefill) if prefill else None)

    def read(self, layer: int, block_ids: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv heads, tokens, head_dim] of the blocks."""
        return kept_of(self._layers[layer], block_ids)

    def __call__(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, inputs: DeviceInputs) -> torch.Tensor:
        heads = torch.cat((queries, kv.flatten(1, 2)), dim=1)
        return self.rope_and_attend(layer, heads, None, inputs)

    def rope_and_attend(
        self,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation | None,
        inputs: DeviceInputs,
        norm: tuple[torch.Tensor, float] | None = None,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """With `norm` queries and keys are normalised first (`rope_and_store`). `output` is where the result goes, if
        that is given."""
        tables = None if rotation is None else (rotation.cosines, rotation.sines)
        queries = triton_kernels.rope_and_store(
            heads, self._layers[layer], inputs.slots, tables, self._scales[layer], norm
        )
        num_tokens, num_heads, _ = queries.shape
        if output is None:
            output = torch.empty(num_tokens, num_heads * self._value_width, dtype=heads.dtype, device=heads.device)
        count = inputs.num_decodes
        if count:
            self._decode(layer, queries[:count], inputs.tables[:count], inputs.lens[:count], output[:count])
        if inputs.prefill is not None:
            self._prefill(
                layer, queries[count:], inputs.tables[count:], inputs.lens[count:], inputs.prefill, output[count:]
            )
        return output

    def _decode(
        self, layer: int, queries: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor, output: torch.Tensor
    ) -> None:
        spec = self._spec
        triton_kernels.decode_attention(
            queries,
            self._layers[layer],
            tables,
            lens,
            scale=spec.scale,
            num_splits=self._num_splits(len(queries) * self._num_kv_heads),
            window=spec.windows[layer],
            softcap=spec.softcap,
            sinks=spec.sinks_of(layer),
            scales=self._scales[layer],
            output=output,
        )

    def _prefill(
        self,
        layer: int,
        queries: torch.Tensor,
        tables: torch.Tensor,
        lens: torch.Tensor,
        tiles: PrefillTiles,
        output: torch.Tensor,
    ) -> None:
        spec = self._spec
        triton_kernels.prefill_attention(
            queries,
            self._layers[layer],
            tables,
            lens,
            num_queries=tiles.num_queries,
            row_starts=tiles.row_starts,
            tile_rows=tiles.tile_rows,
            tile_starts=tiles.tile_starts,
            tile_queries=self._tile_queries,
            scale=spec.scale,
            window=spec.windows[layer],
            softcap=spec.softcap,
            sinks=spec.sinks_of(layer),
            scales=self._scales[layer],
            output=output,
        )

    def _num_splits(self, num_programs: int) -> int:
        """Depends only on the number of rows, so that a captured step stays valid while its sequences grow."""
        wanted = -(-2 * self._num_processors // num_programs)
        return max(1, min(wanted, _MOST_SPLITS))

    def _prefill_arrays(self, batch: AttentionBatch) -> list[IntArray]:
        num_queries = batch.num_queries[batch.num_decodes :]
        tile_rows, tile_starts = self._tiles(num_queries)
        return [num_queries, np.cumsum(num_queries) - num_queries, tile_rows, tile_starts]

    def _tiles(self, num_queries: IntArray) -> tuple[IntArray, IntArray]:
        return _cut(num_queries, self._tile_queries)


class TritonLatentAttention(TritonAttention):
    """Of keys that contain the values. UnsupportedError for windows, soft caps and sinks.

    `shared_bytes`: the memory that the threads of a program may share on the device.
    """

    def __init__(
        self, blocks: KvBlocks, spec: AttentionSpec, *, num_processors: int, shared_bytes: int = _SMALL_SHARED_BYTES
    ) -> None:
        super().__init__(blocks, spec, num_processors=num_processors)
        self._lanes = prefill_lanes(blocks.layout.group.heads_dtype, shared_bytes)
        if any(spec.windows) or spec.softcap is not None or spec.sinks:
            raise UnsupportedError("latent attention on a GPU has no windows, soft caps or sinks")
        self._value_width = blocks.layout.group.shared_width

    def _decode(
        self, layer: int, queries: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor, output: torch.Tensor
    ) -> None:
        num_tiles = -(-self._spec.num_heads // _DECODE_LANES)
        triton_latent.decode(
            queries,
            self._layers[layer],
            tables,
            lens,
            width=self._value_width,
            scale=self._spec.scale,
            num_splits=self._num_splits(len(queries) * num_tiles),
            lanes=_DECODE_LANES,
            output=output,
        )

    def _prefill(
        self,
        layer: int,
        queries: torch.Tensor,
        tables: torch.Tensor,
        lens: torch.Tensor,
        tiles: PrefillTiles,
        output: torch.Tensor,
    ) -> None:
        triton_latent.prefill(
            queries,
            self._layers[layer],
            tables,
            lens,
            width=self._value_width,
            scale=self._spec.scale,
            num_queries=tiles.num_queries,
            row_starts=tiles.row_starts,
            tile_rows=tiles.tile_rows,
            tile_starts=tiles.tile_starts,
            lanes=self._lanes,
            output=output,
        )

    def _tiles(self, num_queries: IntArray) -> tuple[IntArray, IntArray]:
        return _cut(num_queries * self._spec.num_heads, self._lanes)


def prefill_lanes(dtype: torch.dtype, shared_bytes: int) -> int:
    """Of latent attention."""
    if dtype is torch.float32:
        return _DECODE_LANES
    return _MANY_LANES if shared_bytes >= _LARGE_SHARED_BYTES else _FEW_LANES


def _cut(lengths: IntArray, step: int) -> tuple[IntArray, IntArray]:
    """Of rows that are cut into tiles of `step`: each tile's row, and where in it the tile begins."""
    num_tiles = -(-lengths // step)
    tile_rows = np.repeat(np.arange(len(lengths)), num_tiles)
    firsts = np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    return tile_rows, (np.arange(len(tile_rows)) - firsts) * step
