"""The plan of one step of the engine, and its result: the interface between scheduler and runner."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from .sequence import Sequence

_NUM_TOKENS = itemgetter(2)


class Chunk(NamedTuple):
    """Tokens `[start, start + num_tokens)` of a sequence; their blocks are allocated.

    Its last `num_sampled` rows give tokens. That is 1 where the chunk reaches the sequence's last token, else 0; a
    chunk that ends with drafts gives a token behind each of them, too. The last token may be one that is sampled but
    not read (`Sequence.num_placeholders`): then it lies at the end, beyond `token_ids`, and only the device knows it.
    A tuple, because every step makes one per sequence.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_sampled: int


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
    """The sampler's choice for one row."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. `sampled` has the tokens of each chunk with `num_sampled`, in the order of the plan.

    They are the sequence's next tokens, at least one and at most `num_sampled`: a draft that is not what was sampled
    in its place ends them.

    `prompt_logprobs`: by seq_id, for each position of a chunk that is followed by a prompt token, that token's.
    """

    sampled: tuple[tuple[SampledToken, ...], ...]
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]
