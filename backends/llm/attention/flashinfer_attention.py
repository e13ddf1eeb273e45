"""Attention by flashinfer's paged kernels, where it is installed and asked for (NVIDIA GPUs)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import flashinfer
import numpy as np
import torch

from .kv_blocks import KvBlocks
from .paged import AttentionBatch, AttentionSpec, IntArray, Rotation, kept_of

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class FlashInferInputs:
    """Where each token goes: its block, and its place in that."""

    blocks: torch.Tensor
    offsets: torch.Tensor


class FlashInferAttention:
    """Decodes are chunks of one query here: the kernels for prefill have tensor cores for both.

    A plan holds for one window, so there is a wrapper for each window that some layer has. Sinks take their part away
    from what comes out: its kernels tell the sums of their softmax, as logarithms to base 2 [tokens, heads].
    """

    def __init__(self, blocks: KvBlocks, spec: AttentionSpec) -> None:
        self._spec = spec
        self._group = blocks.layout.group
        self._block_size = blocks.block_size
        self._device = blocks.device
        self._layers = blocks.layers
        self._pairs = [(layer[:, :, 0], layer[:, :, 1]) for layer in self._layers]
        self._wrappers: dict[int | None, Any] = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device), "NHD"
            )
            for window in set(spec.windows)
        }

    def prepare(self, batch: AttentionBatch) -> FlashInferInputs:
        num_blocks = -(-batch.lens // self._block_size)
        is_used = np.arange(batch.block_tables.shape[1]) < num_blocks[:, None]
        starts = [_running(batch.num_queries), _running(num_blocks)]
        last_lens = (batch.lens - 1) % self._block_size + 1
        arrays = [*starts, batch.block_tables[is_used], last_lens]
        query_starts, block_starts, block_ids, last = (
            torch.from_numpy(array.astype(np.int32)).to(self._device) for array in arrays
        )
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                query_starts,
                block_starts,
                block_ids,
                last,
                self._spec.num_heads,
                self._group.num_heads,
                self._group.key_width,
                self._block_size,
                causal=True,
                sm_scale=self._spec.scale,
                window_left=-1 if window is None else window - 1,
                logits_soft_cap=self._spec.softcap or 0.0,
                q_data_type=self._group.dtype,
                kv_data_type=self._group.dtype,
            )
        slots = torch.from_numpy(batch.slots).to(self._device)
        return FlashInferInputs(slots // self._block_size, slots % self._block_size)

    def read(self, layer: int, block_ids: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv heads, tokens, head_dim] of the blocks."""
        return kept_of(self._layers[layer], block_ids)

    def __call__(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, inputs: FlashInferInputs) -> torch.Tensor:
        self._layers[layer][inputs.blocks, inputs.offsets] = kv
        wrapper, sinks = self._wrappers[self._spec.windows[layer]], self._spec.sinks_of(layer)
        if sinks is None:
            return wrapper.run(queries.contiguous(), self._pairs[layer]).flatten(1)
        output, log2_sums = wrapper.run(queries.contiguous(), self._pairs[layer], return_lse=True)
        shares = torch.sigmoid(log2_sums * math.log(2.0) - sinks)
        return (output * shares[..., None].to(output.dtype)).flatten(1)

    def rope_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation | None, inputs: FlashInferInputs
    ) -> torch.Tensor:
        num_heads = self._spec.num_heads
        if rotation is not None:
            rotation.apply_rope(heads[:, : num_heads + self._group.num_heads])
        kv = heads[:, num_heads:].unflatten(1, (2, self._group.num_heads))
        return self(layer, heads[:, :num_heads], kv, inputs)


def _running(counts: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each begins, and the end of all."""
    return np.concatenate(([0], np.cumsum(counts)))
