"""SDPA over gathered blocks equals attention written out, whatever stands where."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from modelserver_backends.llm.attention import sdpa, twins
from modelserver_backends.llm.attention.kv_blocks import KvBlocks, KvLayout
from modelserver_backends.llm.attention.paged import AttentionBatch, AttentionSpec
from modelserver_backends.llm.attention.sdpa import SdpaAttention

COUNTS, LENS = np.array([1, 1, 1, 5, 20, 30]), np.array([63, 30, 9, 5, 41, 30])
CASES = list(itertools.product([None, 7, 40], [None, 3.0], [(4, 2), (3, 3), (6, 1)], [False, True]))


@pytest.mark.parametrize(("window", "softcap", "heads", "has_sinks"), CASES)
@pytest.mark.parametrize("limits", [{}, {"_TILE_BYTES": 1, "_PIECE_ROWS": 8}, {"_PADDING_BYTES": 1}])
def test_a_mixed_step(
    window: int | None,
    softcap: float | None,
    heads: tuple[int, int],
    has_sinks: bool,
    limits: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(sdpa, name, value)
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    shape = KvLayout.uniform(num_layers=1, num_kv_heads=num_kv_heads, head_dim=16, dtype=torch.float32)
    blocks = KvBlocks(shape, num_blocks=49, block_size=8, device=torch.device("cpu"))
    blocks.layers[0].normal_()
    tables = np.random.default_rng(0).permutation(np.arange(1, 49)).reshape(6, 8)
    slots = np.array(
        [
            tables[row, at // 8] * 8 + at % 8
            for row, (count, length) in enumerate(zip(COUNTS, LENS, strict=True))
            for at in range(length - count, length)
        ]
    )
    sinks = torch.randn(num_heads) * 3 if has_sinks else None
    spec = AttentionSpec(num_heads=num_heads, windows=(window,), scale=0.3, softcap=softcap, sinks=(sinks,))
    attention = SdpaAttention(blocks, spec)
    queries, kv = torch.randn(58, num_heads, 16), torch.randn(58, 2, num_kv_heads, 16)
    kept = attention.kept(0)
    found = attention(0, queries, kv, attention.prepare(AttentionBatch(3, COUNTS, LENS, tables, slots)))
    expected = twins.prefill_attention(
        queries,
        attention.kept(0).unflatten(0, (49, 8)),
        torch.from_numpy(tables),
        torch.from_numpy(LENS),
        num_queries=torch.from_numpy(COUNTS),
        scale=0.3,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    kept[torch.from_numpy(slots)] = kv
    torch.testing.assert_close(attention.kept(0), kept, atol=0, rtol=0)


def test_masks_of_a_gpu_begin_at_aligned_addresses() -> None:
    """Its kernels refuse others, and torch looks at strides alone before it calls them."""
    device = torch.device("meta")  # as on a GPU, addresses are all that there is to see
    shape = KvLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=16, dtype=torch.float16)
    attention = SdpaAttention(
        KvBlocks(shape, num_blocks=2, block_size=8, device=device), AttentionSpec(num_heads=2, windows=(None,), scale=1)
    )
    for num_past in (64, 33, 1):
        mask = attention._causal_mask(None, 5, num_past)
        assert mask.shape == (5, num_past + 5)
        assert mask.storage_offset() % 8 == 0, num_past
