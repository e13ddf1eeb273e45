"""What an implementation of attention must know of a network."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """`windows`: each layer's sliding window, None if it sees everything. `softcap` bounds scores before softmax.

    `chunks`: each layer's, None if it has none; without any layer's, nothing. Sequences are cut into chunks of so many
    tokens, and a token sees those of its own. Implementations do not know of them: `ChunkedAttention` does.

    `sinks`: each layer's [num_heads] in float32, None if it has none; without any layer's, nothing. A head's sink is a
    score of a token that is always seen and whose values are zero: it takes its part of the softmax away.
    """

    num_heads: int
    windows: tuple[int | None, ...]
    scale: float
    softcap: float | None = None
    sinks: tuple[torch.Tensor | None, ...] = ()
    chunks: tuple[int | None, ...] = ()

    @property
    def window(self) -> int | None:
        """How far back any layer looks; None if some layer sees everything."""
        chunks = self.chunks or (None,) * len(self.windows)
        bounds = [chunk if window is None else window for window, chunk in zip(self.windows, chunks, strict=True)]
        widths = [bound for bound in bounds if bound is not None]
        return max(widths) if widths and len(widths) == len(self.windows) else None

    def sinks_of(self, layer: int) -> torch.Tensor | None:
        return self.sinks[layer] if self.sinks else None
