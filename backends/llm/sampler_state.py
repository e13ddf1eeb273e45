"""What the sampler knows of one sequence besides its parameters, made at its first token and kept in the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .dry import Repetitions, breaker_ids
from .penalties import TokenCounts, has_penalties
from .samplers import Truncation, drawn_after, has_samplers

if TYPE_CHECKING:
    from .sequence import Sequence
    from .text.tokenizer import Tokenizer


class SamplerState:
    """`bad_words`: token ids of each banned word. `stop_token_ids`: those that must not come before `min_tokens`.

    `is_edited`: some rule changes this sequence's logits before a token is drawn. `drawn` are the parameters of the
    draw itself: the sequence's, unless `truncation` has applied some of them before.
    """

    __slots__ = ("bad_words", "counts", "drawn", "is_edited", "repetitions", "stop_token_ids", "truncation")

    def __init__(self, sequence: Sequence, eos_token_ids: frozenset[int], tokenizer: Tokenizer | None) -> None:
        params = sequence.params
        self.bad_words = _bad_word_ids(params.bad_words, tokenizer)
        eos = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_token_ids = sorted(eos.union(params.stop_token_ids)) if params.min_tokens > 0 else []
        self.counts: TokenCounts | None = None
        if has_penalties(params):
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            self.counts = TokenCounts(prompt, has_prompt=params.repetition_penalty != 1.0)
        self.repetitions: Repetitions | None = None
        if params.dry_multiplier > 0.0 and params.dry_penalty_last_n != 0:
            assert tokenizer is not None, "a request with dry_multiplier reached a sampler without a tokenizer"
            self.repetitions = Repetitions(params, breaker_ids(params.dry_sequence_breakers, tokenizer))
        self.truncation: Truncation | None = None
        self.drawn = params
        if has_samplers(params):
            self.truncation, self.drawn = Truncation(params), drawn_after(params)
        self.is_edited = bool(
            self.bad_words
            or self.repetitions is not None
            or self.truncation is not None
            or self.stop_token_ids
            or self.counts is not None
            or params.logit_bias
            or params.allowed_token_ids is not None
        )


def _bad_word_ids(bad_words: tuple[str, ...], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Each word as the model would write it: at the start of a text, and after a space."""
    if not bad_words:
        return []
    assert tokenizer is not None, "a request with bad_words reached a sampler without a tokenizer"
    found: list[list[int]] = []
    for word in bad_words:
        for written in (word.lstrip(), " " + word.lstrip()):
            token_ids = tokenizer.encode(written, add_special_tokens=False)
            if token_ids and token_ids not in found:
                found.append(token_ids)
    return found
