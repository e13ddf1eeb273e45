"""The seam between networks and attention over blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a step's tokens, [tokens, 1, rotated]; the sines of the first half are negated."""

    cosines: torch.Tensor
    sines: torch.Tensor

    def apply_rope(self, heads: torch.Tensor) -> None:
        """Rotate [tokens, heads, head_dim] in place, each by its position (halves of a head make pairs)."""
        width = self.cosines.shape[-1]
        turned = heads if width == heads.shape[-1] else heads[..., :width]
        torch.addcmul(turned * self.cosines, turned.roll(width // 2, -1), self.sines, out=turned)

    def addresses(self, heads: torch.Tensor) -> tuple[int, int, int]:
        """Of cosines and sines, and how much of a head they turn: for kernels that turn `heads` of as many tokens."""
        cosines, sines = self.cosines, self.sines
        assert cosines.shape == sines.shape == (heads.shape[0], 1, cosines.shape[2]), "a turn for every token"
        assert cosines.dtype is sines.dtype is heads.dtype, f"turns are {cosines.dtype}, heads {heads.dtype}"
        assert cosines.is_contiguous(), "the kernels read rows without gaps"
        assert sines.is_contiguous(), "the kernels read rows without gaps"
        return cosines.data_ptr(), sines.data_ptr(), cosines.shape[2]


class PagedAttention(Protocol):
    """`is_capturable`: its steps on a GPU can be recorded as graphs."""

    is_capturable: bool

    def prepare(self, batch: AttentionBatch) -> Any:
        """What all layers need of a step."""
        ...

    def __call__(self, layer: int, queries: torch.Tensor, kv: torch.Tensor, inputs: Any) -> torch.Tensor:
        """Keep `kv` [tokens, 2, kv heads, head_dim], then attend: `queries` [tokens, heads, head_dim] -> heads joined.

        All of the batch is kept before any of it is read: a prefix may be shared within a step.
        """
        ...

    def rope_and_attend(self, layer: int, heads: torch.Tensor, rotation: Rotation | None, inputs: Any) -> torch.Tensor:
        """The same from queries, keys and values [tokens, heads + 2 * kv heads, head_dim] that are not turned yet."""
        ...
