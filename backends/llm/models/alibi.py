"""Linear biases by position (ALiBi, https://arxiv.org/abs/2108.12409) by any implementation of attention.

A score gains slope * (position of the key - position of the query). Softmax does not change where all scores of a query
change alike, so slope * position of the key does the same, and that is a product: keys get their position as further
values, and queries their slope. A position is 256 * a + b, of which half precision has a and b exactly; a slope is the
sum of two values for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..step_context import StepContext
from .decoder import SelfAttention
from .decoder_config import SLOPE_BASE


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The paper's. If heads are no power of 2, every other slope of twice the power below follows that power's own."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * number / power) for number in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * number / power) for number in range(1, 2 * power, 2)]
    return tuple(slopes[:num_heads])


class SlopedAttention(SelfAttention):
    """`slopes` are those of this rank's query heads, `scale` is what products of queries and keys are multiplied by.

    Heads are kept and attend as `kept_head_dim` values, of which those behind the slopes are zero.
    """

    def __init__(
        self,
        *args: Any,
        slopes: Sequence[float],
        scale: float,
        kept_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._num_heads = len(slopes)
        self._kept_head_dim = kept_head_dim
        exact = torch.tensor([[SLOPE_BASE * slope / scale, slope / scale] for slope in slopes], dtype=torch.float64)
        near = exact.to(dtype)
        self._slopes = torch.cat((near, (exact - near).to(dtype)), dim=1).to(device)

    def _mixed(self, rows: torch.Tensor, step: StepContext) -> torch.Tensor:
        num_rows, (num_all, head_dim) = rows.shape[0], self._heads_shape
        heads = rows.new_zeros(num_rows, num_all, self._kept_head_dim)
        heads[..., :head_dim] = self.qkv(rows, step).view(num_rows, num_all, head_dim)
        turned = heads[:, : self._num_turned]
        if self.qk_norm is not None:
            turned[..., :head_dim] = self.qk_norm(turned[..., :head_dim].contiguous())
        further = turned[..., head_dim : head_dim + self._slopes.shape[1]]
        further[:, : self._num_heads] = self._slopes
        places = torch.stack((step.positions // SLOPE_BASE, step.positions % SLOPE_BASE), dim=-1)
        further[:, self._num_heads :] = places.repeat(1, 2)[:, None]
        rotation = None if self.rotation is None else step.rotations[self.rotation]
        mixed = step.attention.rope_and_attend(self.layer, heads, rotation, step.inputs)
        return mixed.view(num_rows, self._num_heads, -1)[..., :head_dim].flatten(1)
