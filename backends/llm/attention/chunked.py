"""Layers whose tokens see those of their own chunk only: Llama 4's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from modelserver.backend import UnsupportedError

from .kv_blocks import KvBlocks
from .paged import AttentionBatch, AttentionSpec, IntArray, PagedAttention, Rotation
from .sdpa import SdpaAttention


@dataclass(frozen=True, slots=True)
class ChunkedInputs:
    """A step's inputs by the layers' chunks; None: of those that go beyond."""

    by_chunk: dict[int | None, Any]


class ChunkedAttention:
    """An implementation that gets each chunk as if it were a sequence: no kernel knows of chunks. Its steps are
    prepared several times, so what it is to know of one must be in its inputs.

    What a token sees begins with a block then, so `block_size` must divide chunks: else UnsupportedError.
    """

    def __init__(self, attention: PagedAttention, chunks: Sequence[int | None], block_size: int) -> None:
        for chunk in chunks:
            if chunk is not None and chunk % block_size:
                raise UnsupportedError(
                    f"layers attend within chunks of {chunk} tokens, which blocks of {block_size} do not fill: "
                    f"set block_size to a divisor of {chunk}"
                )
        self._attention = attention
        self._chunks = tuple(chunks)
        self._block_size = block_size

    def prepare(self, batch: AttentionBatch) -> ChunkedInputs:
        prepare = self._attention.prepare
        return ChunkedInputs(
            {
                chunk: prepare(batch if chunk is None else chunked_batch(batch, chunk, self._block_size))
                for chunk in set(self._chunks)
            }
        )

    def __call__(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, inputs: ChunkedInputs) -> torch.Tensor:
        return self._attention(layer, queries, kv, inputs.by_chunk[self._chunks[layer]])

    def rope_and_attend(
        self, layer: int, heads: torch.Tensor, rotation: Rotation | None, inputs: ChunkedInputs
    ) -> torch.Tensor:
        return self._attention.rope_and_attend(layer, heads, rotation, inputs.by_chunk[self._chunks[layer]])


class ChunkedSdpa(ChunkedAttention):
    """The same of sequences without blocks, too."""

    def __init__(self, attention: SdpaAttention, chunks: Sequence[int | None], block_size: int) -> None:
        super().__init__(attention, chunks, block_size)
        self._sdpa = attention

    def prepare_fresh(self, lengths: Sequence[int]) -> ChunkedInputs:
        prepare = self._sdpa.prepare_fresh
        return ChunkedInputs(
            {chunk: prepare(lengths if chunk is None else _cut_lengths(lengths, chunk)) for chunk in set(self._chunks)}
        )


def chunked_batch(batch: AttentionBatch, chunk: int, block_size: int) -> AttentionBatch:
    """The same tokens, in rows that end with a chunk at the latest and whose length and blocks count from its start."""
    rows, firsts, counts = _parts(batch, chunk)
    seen_lens = firsts + counts
    starts = (seen_lens - 1) // chunk * chunk
    lens = seen_lens - starts
    width = max(1, -(-int(lens.max(initial=0)) // block_size))
    columns = starts[:, None] // block_size + np.arange(width)
    tables = batch.block_tables[rows[:, None], np.minimum(columns, batch.block_tables.shape[1] - 1)]
    tables[np.arange(width) * block_size >= lens[:, None]] = 0
    return AttentionBatch(
        num_decodes=batch.num_decodes, num_queries=counts, lens=lens, block_tables=tables, slots=batch.slots
    )


def _parts(batch: AttentionBatch, chunk: int) -> tuple[IntArray, IntArray, IntArray]:
    """Of each row's new tokens cut where chunks end: its row, the position of the first token, how many there are."""
    ends, starts = batch.lens, batch.lens - batch.num_queries
    num_parts = (ends - 1) // chunk - starts // chunk + 1
    rows = np.repeat(np.arange(len(ends)), num_parts)
    index = np.arange(len(rows)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    borders = (starts // chunk)[rows] * chunk + index * chunk
    firsts = np.maximum(starts[rows], borders)
    return rows, firsts, np.minimum(ends[rows], borders + chunk) - firsts


def _cut_lengths(lengths: Sequence[int], chunk: int) -> list[int]:
    return [min(chunk, length - start) for length in lengths for start in range(0, length, chunk)]


def make_sdpa(blocks: KvBlocks, spec: AttentionSpec) -> SdpaAttention | ChunkedSdpa:
    """The reference, chunks and all."""
    attention = SdpaAttention(blocks, spec)
    return ChunkedSdpa(attention, spec.chunks, blocks.block_size) if spec.chunks else attention
