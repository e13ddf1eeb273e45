"""What one step of the engine computes, and what came of it: all that scheduler and runner say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from .sequence import Sequence

_NUM_TOKENS = itemgetter(2)


class Chunk(NamedTuple):
    """Tokens `[start, start + num_tokens)` of a sequence; their blocks are allocated.

    `is_sampled`: the chunk reaches the sequence's last token, so its last row gives the next one. That last token may
    be one that is sampled but not read (`Sequence.num_placeholders`): then it lies at the end, beyond `token_ids`, and
    only the device knows it. A tuple, because every step makes one per sequence.
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
    # Those of its sequences that waited before.
    admitted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(_NUM_TOKENS, self.chunks))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position: the token's own log-probability and rank (1 is the most probable), and the best alternatives.

    Taken from the raw logits' log-softmax, before penalties and temperature (vLLM's `raw_logprobs`).
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """What the sampler chose for one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave. `sampled` has an entry for each chunk with `is_sampled`, in the order of the plan.

    `prompt_logprobs`: by seq_id, for each position of a chunk that is followed by a prompt token, that token's.
    """

    sampled: tuple[SampledToken, ...]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]
