"""Attention over what a sequence has kept, with its projections."""

from __future__ import annotations

import torch

from ..step_context import StepContext
from .linear import Linear
from .norm import Norm


class SelfAttention:
    """`rotation` says which of the step's rotations turns queries and keys; None: none does.

    `num_heads` query heads and `num_kv_heads` key and value heads of `head_dim` are this rank's.
    """

    def __init__(
        self,
        layer: int,
        *,
        qkv: Linear,
        output: Linear,
        qk_norm: Norm | None,
        rotation: int | None,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self._layer = layer
        self._qkv = qkv
        self._output = output
        self._qk_norm = qk_norm
        self._rotation = rotation
        self._num_turned = num_heads + num_kv_heads
        self._heads_shape = (num_heads + 2 * num_kv_heads, head_dim)

    def __call__(self, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        return self._output(self._mixed(rows, step), step)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, step: StepContext, /) -> torch.Tensor:
        return self._output.add_to(residual, self._mixed(rows, step), step)

    def _mixed(self, rows: torch.Tensor, step: StepContext) -> torch.Tensor:
        heads = self._qkv(rows, step).view(rows.shape[0], *self._heads_shape)
        if self._qk_norm is not None:
            turned = heads[:, : self._num_turned]
            turned.copy_(self._qk_norm(turned))
        rotation = None if self._rotation is None else step.rotations[self._rotation]
        return step.attention.rope_and_attend(self._layer, heads, rotation, step.inputs)
