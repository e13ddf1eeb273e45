"""Attention in torch's operations, of which those of decodes depend on no value: a graph can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from modelserver_backends.llm.attention.kv_blocks import KvBlocks
from modelserver_backends.llm.attention.paged import (
    AttentionBatch,
    AttentionSpec,
    DeviceInputs,
    IntArray,
    Rotation,
    copied_together,
)


class TorchAttention:
    def __init__(self, blocks: KvBlocks, spec: AttentionSpec) -> None:
        self._layers = blocks.layers
        self._spec = spec
        self._num_kv_heads = blocks.layout.group.num_heads
        self._prefills: list[int] = []

    def prepare(self, batch: AttentionBatch) -> DeviceInputs:
        tables, *copied = copied_together([batch.block_tables, *self.arrays_of(batch)], torch.device("cpu"))
        return self.inputs_of(batch.num_decodes, tables.view(len(batch.lens), -1), copied)

    def arrays_of(self, batch: AttentionBatch) -> list[IntArray]:
        self._prefills = batch.num_queries[batch.num_decodes :].tolist()
        return [batch.slots, batch.lens]

    def inputs_of(self, num_decodes: int, tables: torch.Tensor, arrays: Sequence[torch.Tensor]) -> DeviceInputs:
        return DeviceInputs(num_decodes, *arrays, tables)

    def rope_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation | None, inputs: DeviceInputs
    ) -> torch.Tensor:
        num_heads, blocks = self._spec.num_heads, self._layers[layer]
        if rotation is not None:
            rotation.apply_rope(heads[:, : num_heads + self._num_kv_heads])
        # Nothing reads block 0.
        places = inputs.slots.clamp(min=0)
        kv = heads[:, num_heads:].unflatten(1, (2, self._num_kv_heads))
        blocks[places // blocks.shape[1], places % blocks.shape[1]] = kv
        count = inputs.num_decodes
        positions = inputs.lens[:count, None] - 1
        found = [self._attend(heads[:count, None, :num_heads], blocks, inputs.tables[:count], positions)]
        start = count
        for row, num_queries in enumerate(self._prefills if start < len(heads) else [], count):
            own = heads[None, start : start + num_queries, :num_heads]
            end = int(inputs.lens[row])
            positions = torch.arange(end - num_queries, end)[None]
            found.append(self._attend(own, blocks, inputs.tables[row : row + 1], positions))
            start += num_queries
        return torch.cat(found)

    def _attend(
        self, queries: torch.Tensor, blocks: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """`queries` [sequences, tokens, heads, head_dim] at `positions` [sequences, tokens]."""
        kv: Any = blocks[tables.long()].flatten(1, 2)
        groups = queries.shape[2] // self._num_kv_heads
        keys, values = (part.repeat_interleave(groups, dim=2) for part in kv.unbind(2))
        scores = torch.einsum("sqhd,skhd->shqk", queries, keys) * self._spec.scale
        is_seen = torch.arange(keys.shape[1]) <= positions[:, None, :, None]
        weights = scores.masked_fill(~is_seen, float("-inf")).softmax(dim=-1).nan_to_num(0.0)
        return torch.einsum("shqk,skhd->sqhd", weights, values).flatten(0, 1).flatten(1)
