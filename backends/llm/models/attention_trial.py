"""Attention over a few tokens without a cache, to see how a network of transformers calls its own, and whether it says
the same with ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from modelserver.backend import UnsupportedError

NUM_TRIED = 8
# Of logits, relative to their size: half precision rounds, and may choose other experts for a token; but not for most.
_TOLERANCE, _HALF_TOLERANCE = 0.01, 0.2
_SMALLEST = 1e-6


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """How one layer's attention is called: what it shares with the others must be equal.

    `sinks`: as `AttentionSpec.sinks` has them, in the model's dtype.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    sinks: torch.Tensor | None = None
    chunk: int | None = None


@dataclass(slots=True)
class TrialAttention:
    """Stands in for attention once; `calls` says how the layers called it."""

    calls: dict[int, AttentionCall] = field(default_factory=dict)

    def __call__(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """`queries` [tokens, heads, head_dim], `kv` [tokens, 2, kv heads, head_dim] -> [tokens, heads * head_dim]."""
        if layer in self.calls:
            raise UnsupportedError(f"layer {layer} attends more than once, and has keys and values for one time only")
        self.calls[layer] = call
        groups = queries.shape[1] // kv.shape[2]
        keys, values = kv.float().repeat_interleave(groups, dim=2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * call.scale
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        places = torch.arange(len(queries), device=queries.device)
        distances = places[:, None] - places[None, :]
        is_seen = distances >= 0
        if call.window is not None:
            is_seen &= distances < call.window
        if call.chunk is not None:
            is_seen &= places[:, None] // call.chunk == places[None, :] // call.chunk
        scores = scores.masked_fill(~is_seen, float("-inf"))
        if call.sinks is not None:
            scores = torch.cat((scores, call.sinks.float()[:, None, None].expand(-1, len(queries), 1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(queries)]
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1).to(queries.dtype)


def check_equal(found: torch.Tensor, expected: torch.Tensor, *, is_exact: bool, is_strict: bool = False) -> None:
    """Logits [tokens, vocab_size] of the same tokens. UnsupportedError, if most of them differ; with `is_strict`, of
    exact ones, if any do.
    """
    sizes = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    # The embedding of a token of padding may be zero, and then all of its logits are.
    errors = (found - expected).norm(dim=-1) / sizes.clamp_min(_SMALLEST)
    error = float(errors.max() if is_strict and is_exact else errors.median())
    if not error < (_TOLERANCE if is_exact else _HALF_TOLERANCE):
        raise UnsupportedError(f"logits on blocks differ from those by the model's own attention, by {error:.0%}")
