"""From token ids to the rows that a network begins with."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class TokenEmbedding(Protocol):
    def __call__(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        """[tokens] -> [tokens, hidden_size], in the dtype of the network."""
        ...


class DenseEmbedding:
    """`weight` [vocab_size, hidden_size] in the dtype of the network."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)
