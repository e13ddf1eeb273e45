"""Log-probabilities and ranks of tokens, and the best alternatives, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .plan import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Of some rows, still on the device: the tokens' own log-probabilities and ranks, and the best `num_top`."""

    logprobs: torch.Tensor  # float32 [rows]
    ranks: torch.Tensor  # int64 [rows]
    top_logprobs: torch.Tensor  # float32 [rows, max(num_top)]
    top_token_ids: torch.Tensor  # int64 [rows, max(num_top)]
    num_top: tuple[int, ...]

    def read(self) -> list[TokenLogprobs]:
        logprobs, ranks = self.logprobs.tolist(), self.ranks.tolist()
        top_logprobs, top_token_ids = self.top_logprobs.tolist(), self.top_token_ids.tolist()
        return [
            TokenLogprobs(
                logprobs[row], ranks[row], tuple(zip(top_token_ids[row][:num], top_logprobs[row], strict=False))
            )
            for row, num in enumerate(self.num_top)
        ]


def rank_tokens(logits: torch.Tensor, token_ids: torch.Tensor, num_top: Sequence[int]) -> LogprobRows:
    """`logits` float32 [rows, vocabulary], a token id and a number of alternatives per row.

    A rank is one more than the number of tokens that are strictly more probable.
    """
    counts = tuple(min(num, logits.shape[1]) for num in num_top)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    norms = logits.logsumexp(dim=-1, keepdim=True)
    ranks = (logits > chosen).sum(dim=-1) + 1
    top = logits.topk(max(counts, default=0), dim=-1)
    return LogprobRows((chosen - norms).squeeze(1), ranks, top.values - norms, top.indices, counts)
