"""Layers with other heads, made alike: attention over what is wider gives what attention over their own gave."""

from __future__ import annotations

from dataclasses import replace

import torch
from modelserver_backends.llm.models.attention_hook import fit_heads
from modelserver_backends.llm.models.attention_trial import AttentionCall, TrialAttention

FULL = AttentionCall(num_heads=6, num_kv_heads=2, head_dim=8, scale=0.3, softcap=None, window=None)


def test_layers_that_are_alike_stay_as_they_are() -> None:
    common, fits = fit_heads([FULL, replace(FULL, window=7)])
    assert (common, fits) == (FULL, [None, None])


def test_wider_heads_say_the_same() -> None:
    torch.manual_seed(0)
    calls = [
        FULL,
        replace(FULL, num_kv_heads=1, head_dim=16, scale=0.25),  # more copies of a wider head
        replace(FULL, num_heads=4, num_kv_heads=4, head_dim=4),  # fewer heads in smaller groups
        replace(FULL, num_kv_heads=6, sinks=torch.randn(6)),
    ]
    common, fits = fit_heads(calls)
    assert (common.num_kv_heads, common.head_dim) == (12, 16)
    for call, fit in zip(calls, fits, strict=True):
        assert fit is not None
        queries, kv = torch.randn(5, call.num_heads, call.head_dim), torch.randn(5, 2, call.num_kv_heads, call.head_dim)
        sinks = None if call.sinks is None else fit.sinks(call.sinks)
        wide = TrialAttention()(0, fit.queries(queries), fit.kv(kv), replace(common, sinks=sinks))
        torch.testing.assert_close(fit.narrowed(wide), TrialAttention()(0, queries, kv, call))
