"""What an implementation of attention must know of a network."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """`windows`: each layer's sliding window, None if it sees everything. `softcap` bounds scores before softmax."""

    num_heads: int
    windows: tuple[int | None, ...]
    scale: float
    softcap: float | None = None

    @property
    def window(self) -> int | None:
        """How far back any layer looks; None if some layer sees everything."""
        widths = [window for window in self.windows if window is not None]
        return max(widths) if widths and len(widths) == len(self.windows) else None
