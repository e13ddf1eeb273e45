"""Attention by our own kernels for CPUs (`_kernels.c`), straight over the blocks of the KV cache: nothing is gathered.

Turning by position, keeping and attending are one call per layer, which lets other threads of Python run meanwhile and
uses the threads of torch. Tokens of a chunk attend in strips, which read keys and values once for all of their queries;
a token's result has the same bits in any chunk. Long chunks of latent attention attend by SDPA; so memory is used as
`SdpaAttention` does.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from .kv_blocks import KvBlocks
from .paged import AttentionBatch, AttentionSpec, IntArray, Rotation
from .sdpa import Prefill, SdpaAttention

# `coding` of `_kernels.c`, by the dtype of codes.
_CODINGS = {torch.int8: 1, torch.float8_e4m3fn: 2}
# A chunk of latent attention with more queries goes through SDPA. Measured of fresh prompts: at 512 it takes twice as
# long as the kernels, at 1,024 a third longer, since each query reads for itself.
_MOST_QUERIES = 512


@dataclass(frozen=True, slots=True)
class CpuInputs:
    """One step: `plan` as the kernels want it, and by window the chunks that go through SDPA."""

    num_tokens: int
    plan: bytes
    prefills: dict[int | None, list[Prefill]]


class CpuAttention:
    def __init__(self, kernels: ModuleType, blocks: KvBlocks, spec: AttentionSpec) -> None:
        group, layers = blocks.layout.group, blocks.layers
        self._kernels = kernels
        self._sdpa = SdpaAttention(blocks, spec)
        self._layers = layers
        self._addresses = [layer.data_ptr() for layer in layers]
        self._windows = spec.windows
        self._sinks = [spec.sinks_of(layer) for layer in range(len(layers))]
        self._dtype = group.heads_dtype
        self._num_heads = spec.num_heads
        self._kept_shape = (group.num_parts, group.num_heads)
        self._heads_shape = (spec.num_heads + group.num_parts * group.num_heads, group.key_width)
        self._width = spec.num_heads * group.output_width
        self._most_queries = _MOST_QUERIES if group.shared_width else 1 << 62
        self._geometry = struct.pack(
            "9q2d",
            spec.num_heads,
            group.num_heads,
            group.key_width,
            blocks.block_size,
            blocks.num_blocks,
            group.heads_dtype == torch.bfloat16,
            _CODINGS[group.dtype] if group.num_scales else 0,
            max(group.block_bytes(blocks.block_size), group.layer_bytes(blocks.block_size)),  # without layers: any
            group.shared_width,
            spec.scale,
            spec.softcap or 0.0,
        )

    def prepare(self, batch: AttentionBatch) -> CpuInputs:
        plan = self._kernels.plan(
            self._geometry,
            batch.num_queries,
            batch.lens,
            batch.block_tables,
            batch.slots,
            self._most_queries,
            torch.get_num_threads(),
        )
        has_long = batch.num_decodes < len(batch.lens) and int(batch.num_queries.max()) > self._most_queries
        prefills = self._sdpa.long_prefills(batch, self._most_queries) if has_long else {}
        return CpuInputs(len(batch.slots), plan, prefills)

    def read(self, layer: int, block_ids: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SdpaAttention.read`."""
        return self._sdpa.read(layer, block_ids)

    def __call__(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, inputs: CpuInputs) -> torch.Tensor:
        return self.rope_and_attend(layer, torch.cat((queries, kv.flatten(1, 2)), dim=1), None, inputs)

    def compute_layers(
        self,
        layers: bytes,
        adapters: bytes,
        bounds: int,
        hidden: torch.Tensor,
        scratch_width: int,
        rotations: Sequence[Rotation],
        inputs: CpuInputs,
    ) -> None:
        """All layers of a step in one call, in place; see `_kernels.c`. Not for a step with long chunks of prompts.

        `adapters` is what they add, empty for a step without; `bounds` the address of those of their rows.
        """
        assert not inputs.prefills, "long chunks attend by SDPA"
        assert hidden.shape[0] == inputs.num_tokens, "a row for each token"
        assert hidden.is_contiguous(), "the kernels read rows without gaps"
        addresses = [number for rotation in rotations for number in rotation.addresses(hidden)]
        scratch = hidden.new_empty(inputs.num_tokens * scratch_width)
        self._kernels.compute_layers(
            self._geometry, inputs.plan, layers, adapters, bounds, hidden.data_ptr(), scratch.data_ptr(), *addresses
        )

    def facts_of(self, layer: int) -> tuple[int, int, int]:
        """For the kernels: the address of a layer's blocks, its window or 0, and the address of its sinks or 0."""
        sinks = self._sinks[layer]
        return self._addresses[layer], self._windows[layer] or 0, 0 if sinks is None else sinks.data_ptr()

    def long_chunks(self, inputs: CpuInputs) -> list[Prefill]:
        """The chunks of latent attention with too many queries for the kernels, in order: SDPA computes them."""
        return inputs.prefills[None]

    def kept(self, layer: int, heads: torch.Tensor, chunk: Prefill) -> torch.Tensor:
        """Of latent attention, what the tokens up to the end of a chunk keep: [tokens, width]."""
        if chunk.page_ids is None:
            return heads[chunk.start : chunk.stop, self._num_heads]
        return self._sdpa.kept_of(layer, chunk)

    def attend_long(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, chunk: Prefill
    ) -> torch.Tensor:
        """A chunk's queries [rows, heads, width] over all keys and values [tokens, heads, width] -> as queries."""
        return self._sdpa.attend_long(queries, keys, values, chunk)

    def rope_and_attend(
        self,
        layer: int,
        heads: torch.Tensor,
        rotation: Rotation | None,
        inputs: CpuInputs,
        *,
        leaves_long: bool = False,
    ) -> torch.Tensor:
        """`heads` [tokens, heads + parts * kv heads, head_dim] are turned in place -> [tokens, heads' outputs].

        `leaves_long`: rows of `long_chunks` get nothing.
        """
        assert heads.is_contiguous(), "the kernels read rows without gaps"
        assert heads.dtype is self._dtype, f"heads are {heads.dtype}, blocks {self._dtype}"
        expected = (inputs.num_tokens, *self._heads_shape)
        assert heads.shape == expected, f"heads of a step are {expected}, got {tuple(heads.shape)}"
        output = heads.new_empty(heads.shape[0], self._width)
        cosines = sines = rotated = 0
        if rotation is not None:
            cosines, sines, rotated = rotation.addresses(heads)
        address, window, sinks = self.facts_of(layer)
        self._kernels.attend(
            self._geometry,
            inputs.plan,
            address,
            heads.data_ptr(),
            cosines,
            sines,
            output.data_ptr(),
            rotated,
            window,
            sinks,
        )
        if inputs.prefills and not leaves_long:
            queries, kv = heads[:, : self._num_heads], heads[:, self._num_heads :].unflatten(1, self._kept_shape)
            for prefill in inputs.prefills[self._windows[layer]]:
                output[prefill.start : prefill.stop] = self._sdpa.prefill(
                    layer, queries, kv, prefill, self._windows[layer]
                )
        return output
