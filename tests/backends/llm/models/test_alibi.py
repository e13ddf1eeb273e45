"""Biases by position, of heads in half precision as of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modelserver_backends.llm.models.alibi import SlopedAttention, alibi_slopes
from support.generations import loaded_engine

from modelserver.backend import InvalidArgumentError, UnsupportedError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_fall_by_the_slope_for_each_position_however_long_the_text_is(dtype: torch.dtype) -> None:
    num_heads, head_dim, slopes = 6, 12, alibi_slopes(6)
    positions = torch.tensor([0, 1, 255, 256, 1000, 1001, 40_000, 65_471, 65_534, 65_535])
    seen: list[torch.Tensor] = []

    def attend(_layer: int, heads: torch.Tensor, _rotation: None, _inputs: None) -> torch.Tensor:
        seen.append(heads.double())
        return heads[:, :num_heads].flatten(1)

    step: Any = SimpleNamespace(
        positions=positions, attention=SimpleNamespace(rope_and_attend=attend), inputs=None, rotations=()
    )
    shape = (len(positions), 3 * num_heads * head_dim)
    attention = SlopedAttention(
        0,
        qkv=lambda rows, _step: rows.new_zeros(shape),
        output=lambda rows, _step: rows,
        qk_norm=None,
        rotation=None,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        slopes=slopes,
        scale=head_dim**-0.5,
        kept_head_dim=16,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    assert attention(torch.zeros(len(positions), 8, dtype=dtype), step).shape == (len(positions), num_heads * head_dim)
    queries, keys = seen[0][:, :num_heads], seen[0][:, num_heads : 2 * num_heads]
    scores = torch.einsum("hd,khd->hk", queries[-1], keys) * head_dim**-0.5
    falls = torch.tensor(slopes, dtype=torch.float64)[:, None] * (positions[-1] - positions)
    assert torch.allclose(scores[:, -1:] - scores, falls, rtol=1e-5, atol=1e-6)


def test_what_would_lose_positions_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with (
        pytest.raises(UnsupportedError, match="8 bits would round"),
        loaded_engine(checkpoint("bloom"), kv_cache_dtype="int8"),
    ):
        pass
    with (
        pytest.raises(InvalidArgumentError, match="more than the 65536 positions"),
        loaded_engine(checkpoint("bloom"), max_model_len=70_000),
    ):
        pass
