"""Tokens see those of their own chunk, on every path: each as through a window of what there is of the chunk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from modelserver_backends.llm.attention import twins
from modelserver_backends.llm.attention.choose import make_attention
from modelserver_backends.llm.attention.chunked import chunked_batch, make_sdpa
from modelserver_backends.llm.attention.kv_blocks import KvBlocks, KvLayout
from modelserver_backends.llm.attention.paged import AttentionBatch, AttentionSpec
from modelserver_backends.llm.attention.sdpa import SdpaAttention
from modelserver_backends.llm.kernels import KERNELS

from modelserver.backend import UnsupportedError

COUNTS, LENS = np.array([1, 1, 1, 1, 5, 20, 30, 16]), np.array([63, 33, 32, 9, 5, 41, 30, 48])
NUM_TOKENS = int(COUNTS.sum())
BLOCK_SIZE, NUM_BLOCKS = 8, 65
PLACES = [
    (row, at) for row, (count, end) in enumerate(zip(COUNTS, LENS, strict=True)) for at in range(end - count, end)
]


def blocks_and_batch(num_layers: int) -> tuple[KvBlocks, AttentionBatch]:
    torch.manual_seed(0)
    shape = KvLayout.uniform(num_layers=num_layers, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    blocks = KvBlocks(shape, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    for layer in blocks.layers:
        layer.normal_()
    tables = np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS)).reshape(len(LENS), -1)
    slots = np.array([tables[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for row, at in PLACES])
    return blocks, AttentionBatch(4, COUNTS, LENS, tables, slots)


@pytest.mark.parametrize("name", ["sdpa", *(() if KERNELS is None else ("cpu",))])
@pytest.mark.parametrize("chunk", [8, 16, 24, 64])
def test_a_mixed_step(name: str, chunk: int) -> None:
    blocks, batch = blocks_and_batch(2)
    spec = AttentionSpec(num_heads=4, windows=(None, None), scale=0.3, chunks=(chunk, None))
    attention = make_attention(name, blocks, spec)
    inputs = attention.prepare(batch)
    queries, kv = torch.randn(NUM_TOKENS, 4, 16), torch.randn(NUM_TOKENS, 2, 2, 16)
    for layer in (0, 1):
        found = attention(layer, queries, kv, inputs)
        kept = SdpaAttention(blocks, spec).kept(layer).unflatten(0, (NUM_BLOCKS, BLOCK_SIZE))
        expected = [
            twins.decode_attention(
                queries[token : token + 1],
                kept,
                torch.from_numpy(batch.block_tables[row : row + 1]),
                torch.tensor([at + 1]),
                scale=0.3,
                window=None if layer else at % chunk + 1,
            )
            for token, (row, at) in enumerate(PLACES)
        ]
        torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=1e-4)


def test_whole_sequences_without_blocks() -> None:
    blocks, _ = blocks_and_batch(2)
    spec = AttentionSpec(num_heads=4, windows=(None, None), scale=0.3, chunks=(16, None))
    attention, lens = make_sdpa(blocks, spec), [40, 5, 16]
    inputs = attention.prepare_fresh(lens)
    queries, kv = torch.randn(61, 4, 16), torch.randn(61, 2, 2, 16)
    # Cut by hand: each piece is a sequence.
    unchunked = SdpaAttention(blocks, AttentionSpec(num_heads=4, windows=(None, None), scale=0.3))
    for layer, pieces in ((0, [16, 16, 8, 5, 16]), (1, lens)):
        expected = unchunked(layer, queries, kv, unchunked.prepare_fresh(pieces))
        torch.testing.assert_close(attention(layer, queries, kv, inputs), expected)


def test_rows_end_with_chunks_and_begin_with_their_blocks() -> None:
    tables = np.array([[9, 8, 7, 6, 5], [1, 2, 3, 4, 0]])
    batch = AttentionBatch(1, np.array([1, 7]), np.array([18, 15]), tables, np.arange(8))
    cut = chunked_batch(batch, 8, 4)
    assert cut.num_decodes == 1
    assert cut.num_queries.tolist() == [1, 7]
    assert cut.lens.tolist() == [2, 7]
    assert cut.block_tables.tolist() == [[5, 0], [3, 4]]
    cut = chunked_batch(batch, 4, 4)
    assert cut.num_queries.tolist() == [1, 4, 3]
    assert cut.lens.tolist() == [2, 4, 3]
    assert cut.block_tables.tolist() == [[5], [3], [4]]


def test_blocks_that_hold_tokens_of_two_chunks_are_refused() -> None:
    blocks, _ = blocks_and_batch(1)
    spec = AttentionSpec(num_heads=4, windows=(None,), scale=0.3, chunks=(12,))
    with pytest.raises(UnsupportedError, match="chunks of 12 tokens, which blocks of 8 do not fill: set block_size"):
        make_attention("auto", blocks, spec)


def test_flashinfer_is_refused() -> None:
    """Its wrappers hold one step's plan, and layers of several kinds want several."""
    blocks, _ = blocks_and_batch(1)
    spec = AttentionSpec(num_heads=4, windows=(None,), scale=0.3, chunks=(16,))
    with pytest.raises(UnsupportedError, match="flashinfer does not attend within chunks"):
        make_attention("flashinfer", blocks, spec)


def test_a_chunk_bounds_how_far_back_a_layer_looks() -> None:
    for windows, chunks, expected in (
        ((None, 5), (8, None), 8),
        ((None, 9), (8, None), 9),
        ((None, None), (8, None), None),
        ((None, None), (8, 8), 8),
    ):
        assert AttentionSpec(num_heads=1, windows=windows, scale=1.0, chunks=chunks).window == expected
