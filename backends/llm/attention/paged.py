"""The seam between networks and attention over blocks: a network's description, a step's batch, and the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

IntArray = np.ndarray[Any, np.dtype[np.int64]]


def copied_together(arrays: Sequence[IntArray], device: torch.device) -> list[torch.Tensor]:
    """The arrays on a device, flat, by one copy, from memory that it may read while the host goes on."""
    joined = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
    if device.type != "cpu":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return list(joined.split([array.size for array in arrays]))


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Sequences in the order of their rows: first `num_decodes` that add one token each, then those that add more.

    Decodes are sorted by length, the longest first, so that neighbours need about as much padding; where rows have
    adapters, those of each adapter are.
    `num_queries` and `lens` [sequences] are the tokens that a sequence adds and its new length; `block_tables`
    [sequences, blocks] is padded with 0; `slots` [tokens] is where each token's keys and values go:
    block id * block size + offset.
    """

    num_decodes: int
    num_queries: IntArray
    lens: IntArray
    block_tables: IntArray
    slots: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """`windows`: each layer's sliding window, None if it sees everything. `softcap` bounds scores before softmax.

    `chunks`: each layer's chunk size, None if it has none; empty if no layer has one. Sequences are cut into chunks of
    this many tokens, and a token sees only its own chunk. `ChunkedAttention` handles this for all implementations.

    `sinks`: each layer's [num_heads] in float32, None if it has none; without any layer's, nothing. A head's sink is a
    score of a token that is always seen and whose values are zero: it takes its part of the softmax away.
    """

    num_heads: int
    windows: tuple[int | None, ...]
    scale: float
    softcap: float | None = None
    sinks: tuple[torch.Tensor | None, ...] = ()
    chunks: tuple[int | None, ...] = ()

    @property
    def window(self) -> int | None:
        """How far back any layer looks; None if some layer sees everything."""
        chunks = self.chunks or (None,) * len(self.windows)
        bounds = [chunk if window is None else window for window, chunk in zip(self.windows, chunks, strict=True)]
        widths = [bound for bound in bounds if bound is not None]
        return max(widths) if widths and len(widths) == len(self.windows) else None

    def sinks_of(self, layer: int) -> torch.Tensor | None:
        return self.sinks[layer] if self.sinks else None


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Of the chunks after the decodes; `row_starts` counts from their first token. See `prefill_attention`."""

    num_queries: torch.Tensor
    row_starts: torch.Tensor
    tile_rows: torch.Tensor
    tile_starts: torch.Tensor


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """One step on the device. Tensors keep their addresses, so that a captured step can be filled anew."""

    num_decodes: int
    slots: torch.Tensor
    lens: torch.Tensor
    tables: torch.Tensor
    prefill: PrefillTiles | None = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a step's tokens, [tokens, 1, rotated]; the sines of the first half are negated."""

    cosines: torch.Tensor
    sines: torch.Tensor

    def apply_rope(self, heads: torch.Tensor) -> None:
        """Rotate [tokens, heads, head_dim] in place, each by its position (halves of a head make pairs)."""
        width = self.cosines.shape[-1]
        turned = heads if width == heads.shape[-1] else heads[..., :width]
        torch.addcmul(turned * self.cosines, turned.roll(width // 2, -1), self.sines, out=turned)

    def addresses(self, heads: torch.Tensor) -> tuple[int, int, int]:
        """Of cosines and sines, and how much of a head they turn: for kernels that turn `heads` of as many tokens."""
        cosines, sines = self.cosines, self.sines
        assert cosines.shape == sines.shape == (heads.shape[0], 1, cosines.shape[2]), "a turn for every token"
        assert cosines.dtype is sines.dtype is heads.dtype, f"turns are {cosines.dtype}, heads {heads.dtype}"
        assert cosines.is_contiguous(), "the kernels read rows without gaps"
        assert sines.is_contiguous(), "the kernels read rows without gaps"
        return cosines.data_ptr(), sines.data_ptr(), cosines.shape[2]


class PagedAttention(Protocol):
    """One whose decode steps can be recorded as graphs has besides `arrays_of(batch)`, arrays of integers, and
    `inputs_of(num_decodes, tables, arrays)`, which makes of them and of block tables, all on the device, what `prepare`
    makes. So a step goes there by one copy.
    """

    def prepare(self, batch: AttentionBatch) -> Any:
        """Prepare a step for all layers."""
        ...

    def __call__(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Keep `kv` [tokens, parts, kv heads, head_dim], then attend: `queries` [tokens, heads, head_dim] -> heads
        joined. A head's keys and values are two parts; keys that contain the values (`KvGroup`) are one.

        All of the batch is kept before any of it is read: a prefix may be shared within a step.
        """
        ...

    def rope_and_attend(self, layer: int, heads: torch.Tensor, rotation: Rotation | None, inputs: Any) -> torch.Tensor:
        """The same of queries, keys and values [tokens, heads + parts * kv heads, head_dim] that are not turned yet."""
        ...


class ReadableAttention(PagedAttention, Protocol):
    """An implementation that can read what it has kept."""

    def read(self, layer: int, block_ids: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv heads, tokens, head_dim] of the blocks, valid until the next call."""
        ...


def kept_of(layer: torch.Tensor, block_ids: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [kv heads, tokens, head_dim] of blocks in a layer's memory, see `KvBlocks.layers`."""
    kept = layer[torch.from_numpy(block_ids).to(layer.device)].permute(2, 3, 0, 1, 4).flatten(2, 3)
    return kept[0], kept[1]
