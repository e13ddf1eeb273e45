"""The same linear layer of all experts of a mixture, called once for all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..step_context import StepContext
from .linear import Linear


class GroupedLinear(Protocol):
    def __call__(self, rows: torch.Tensor, counts: Sequence[int], step: StepContext | None, /) -> torch.Tensor:
        """`rows` [rows, in_features] are sorted by expert; expert i has `counts[i]` of them -> [rows, out_features]."""
        ...


class ListedLinears:
    """A linear layer for each expert; those without rows compute nothing."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = tuple(linears)

    def __call__(self, rows: torch.Tensor, counts: Sequence[int], _step: StepContext | None, /) -> torch.Tensor:
        parts = rows.split(list(counts))
        # The rows are not those of the step: they are sorted, and occur once for each of their experts.
        outputs = [linear(part, None) for linear, part in zip(self._linears, parts, strict=True) if part.shape[0]]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
