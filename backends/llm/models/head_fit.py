"""Layers whose heads differ in number or size, made alike: one shape of blocks and one call of attention serve all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from .attention_trial import AttentionCall


@dataclass(frozen=True, slots=True)
class HeadFit:
    """One layer's heads within those that all layers have: its KV heads are copied `copies` times and its query heads
    shared among the copies; what is wider than its own is zero and gives nothing. Exact, at the cost of memory.

    `wide_group` query heads read a copy, of `wide_dim` each; queries times `factor` make one scale right for all.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    copies: int
    wide_group: int
    wide_dim: int
    factor: float

    def queries(self, queries: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head_dim] -> [tokens, wide heads, wide_dim]."""
        heads = queries.unflatten(1, (self.num_kv_heads, self.group))
        if self.factor != 1.0:
            heads = heads * self.factor
        return F.pad(heads, (0, self.wide_dim - self.head_dim, 0, self._num_added)).flatten(1, 2)

    def kv(self, kv: torch.Tensor) -> torch.Tensor:
        """[tokens, 2, kv heads, head_dim] -> [tokens, 2, wide kv heads, wide_dim]."""
        return F.pad(kv, (0, self.wide_dim - self.head_dim)).repeat_interleave(self.copies, dim=2)

    def sinks(self, sinks: torch.Tensor) -> torch.Tensor:
        return F.pad(sinks.view(self.num_kv_heads, self.group), (0, self._num_added)).flatten()

    def narrowed(self, output: torch.Tensor) -> torch.Tensor:
        """Back: [tokens, wide heads * wide_dim] -> [tokens, heads * head_dim]."""
        heads = output.view(-1, self.num_kv_heads, self.copies * self.wide_group, self.wide_dim)
        return heads[:, :, : self.group, : self.head_dim].flatten(1)

    @property
    def _num_added(self) -> int:
        return self.copies * self.wide_group - self.group


def fit_heads(calls: Sequence[AttentionCall]) -> tuple[AttentionCall, list[HeadFit | None]]:
    """What all layers are called with, but for window, chunk and sinks, and each one's fit; None where it is as all.

    Where no layer attends, heads as small as can be.
    """
    if not calls:
        return AttentionCall(1, 1, 1, 1.0, None, None), []
    num_kv_heads = math.lcm(*(call.num_kv_heads for call in calls))
    group = max(-(-call.num_heads // num_kv_heads) for call in calls)
    common = replace(
        calls[0],
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=max(call.head_dim for call in calls),
    )
    return common, [None if _shape(call) == _shape(common) else _fit(call, common) for call in calls]


def _shape(call: AttentionCall) -> tuple[int, int, int, float]:
    return call.num_heads, call.num_kv_heads, call.head_dim, call.scale


def _fit(call: AttentionCall, common: AttentionCall) -> HeadFit:
    return HeadFit(
        num_kv_heads=call.num_kv_heads,
        group=call.num_heads // call.num_kv_heads,
        head_dim=call.head_dim,
        copies=common.num_kv_heads // call.num_kv_heads,
        wide_group=common.num_heads // common.num_kv_heads,
        wide_dim=common.head_dim,
        factor=call.scale / common.scale,
    )
