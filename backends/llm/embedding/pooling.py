"""From a vector for each token to one for the text, as sentence-transformers does it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Stands for what padding has where the largest is looked for.
_LEAST = -1e9


def pool(hidden: torch.Tensor, lengths: torch.Tensor, ways: Sequence[str]) -> torch.Tensor:
    """`hidden` float32 [rows, tokens, size] with `lengths` [rows] from the left -> [rows, size * len(ways)].

    What padding holds makes no difference.
    """
    mask = (torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None])[..., None]
    pooled = [_pool(hidden, lengths, mask, way) for way in ways]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


def _pool(hidden: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor, way: str) -> torch.Tensor:
    counts = lengths[:, None].to(hidden.dtype)
    match way:
        case "cls":
            return hidden[:, 0]
        case "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
        case "max":
            return hidden.masked_fill(~mask, _LEAST).amax(dim=1)
        case "mean":
            return hidden.masked_fill(~mask, 0.0).sum(dim=1) / counts
        case "mean_sqrt_len":
            return hidden.masked_fill(~mask, 0.0).sum(dim=1) / counts.sqrt()
        case "weightedmean":
            weights = torch.arange(1, hidden.shape[1] + 1, device=hidden.device, dtype=hidden.dtype)[:, None]
            return (hidden.masked_fill(~mask, 0.0) * weights).sum(dim=1) / (counts * (counts + 1) / 2)
        case _:
            raise AssertionError(f"no way of pooling: {way}")
