"""What flashinfer is told of a step: a stand-in with its interface computes from that alone what SDPA computes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from modelserver_backends.llm.attention import twins
from modelserver_backends.llm.attention.kv_blocks import KvBlocks, KvLayout
from modelserver_backends.llm.attention.paged import AttentionBatch, AttentionSpec, Rotation
from modelserver_backends.llm.attention.sdpa import SdpaAttention


class Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper`, as flashinfer 0.7 documents it, on the CPU."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(
        self, query_starts: Any, block_starts: Any, block_ids: Any, last_lens: Any, *shape: int, **terms: Any
    ) -> None:
        assert terms["causal"]
        self._heads, self._block_size = shape[0], shape[3]
        self._starts, self._block_starts = query_starts.tolist(), block_starts.tolist()
        self._block_ids, self._last_lens, self._terms = block_ids, last_lens.tolist(), terms

    def run(self, queries: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], *, return_lse: bool = False) -> Any:
        output = self._attended(queries, pair, None)
        if not return_lse:
            return output
        # From how much less is left beside a sink of 0: 1 - 1 / (1 + sum).
        share = (self._attended(queries, pair, torch.zeros(queries.shape[1])) / output).mean(-1)
        return output, torch.log2(share / (1 - share))

    def _attended(
        self, queries: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], sinks: torch.Tensor | None
    ) -> torch.Tensor:
        blocks, window = torch.stack(pair, dim=2), self._terms["window_left"]
        rows = []
        for row, last in enumerate(self._last_lens):
            ids = self._block_ids[self._block_starts[row] : self._block_starts[row + 1]]
            start, stop = self._starts[row : row + 2]
            length = (len(ids) - 1) * self._block_size + last
            rows.append(
                twins.prefill_attention(
                    queries[start:stop],
                    blocks,
                    ids[None],
                    torch.tensor([length]),
                    num_queries=torch.tensor([stop - start]),
                    scale=self._terms["sm_scale"],
                    window=None if window < 0 else window + 1,
                    softcap=self._terms["logits_soft_cap"] or None,
                    sinks=sinks,
                )
            )
        return torch.cat(rows).view(queries.shape)


def test_a_mixed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.delitem(sys.modules, "modelserver_backends.llm.attention.flashinfer_attention", raising=False)
    from modelserver_backends.llm.attention.flashinfer_attention import FlashInferAttention

    torch.manual_seed(0)
    sinks = (None, torch.randn(4))
    spec = AttentionSpec(num_heads=4, windows=(None, 5), scale=0.25, softcap=3.0, sinks=sinks)
    shape = KvLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    pools = [KvBlocks(shape, num_blocks=10, block_size=4, device=torch.device("cpu")) for _ in range(2)]
    reference = SdpaAttention(pools[0], spec)
    for index, layer in enumerate(pools[0].layers):
        layer.normal_()
        pools[1].layers[index].copy_(reference.kept(index).view_as(layer))
    counts, lens = np.array([1, 1, 6]), np.array([12, 3, 9])
    tables = np.array([[7, 2, 9], [4, 0, 0], [1, 8, 3]])
    ends = zip(counts, lens, strict=True)
    slots = np.array(
        [tables[row, at // 4] * 4 + at % 4 for row, (n, end) in enumerate(ends) for at in range(end - n, end)]
    )
    batch = AttentionBatch(2, counts, lens, tables, slots)
    angles = torch.randn(8, 1, 8)
    for layer in (0, 1):
        heads = torch.randn(8, 8, 8)
        found = [
            one.rope_and_attend(layer, heads.clone(), Rotation(angles.cos(), angles.sin()), one.prepare(batch))
            for one in (reference, FlashInferAttention(pools[1], spec))
        ]
        torch.testing.assert_close(found[0], found[1])
