"""What one step of the engine computes, and what came of it: all that scheduler and runner say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + num_tokens)` of a sequence; their blocks are allocated.

    `is_sampled`: the chunk reaches the sequence's last token, so its last row gives the next one.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Chunks in the order of the batch; a sequence occurs once. Prefills and decodes are mixed as they come."""

    chunks: tuple[Chunk, ...]
    # Sequences that lost their blocks for this step: they wait again, and are computed anew.
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position: the token's own log-probability and rank (1 is the most probable), and the best alternatives.

    Taken from the raw logits' log-softmax, before penalties and temperature (vLLM's `raw_logprobs`).
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave. `sampled` has an entry for each chunk with `is_sampled`, in the order of the plan.

    `prompt_logprobs`: by seq_id, for each position of a chunk that is followed by a prompt token, that token's.
    """

    sampled: tuple[SampledToken, ...]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]
