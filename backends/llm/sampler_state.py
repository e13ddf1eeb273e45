"""What the sampler knows of one sequence besides its parameters, made at its first token and kept in the sequence:
penalties, and the rules that change logits before a token is drawn."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from .samplers import Repetitions, Truncation, breaker_ids, drawn_after, has_samplers
from .sampling_params import SamplingParams

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


_FIRST_CAPACITY = 64


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


class TokenCounts:
    """The distinct tokens of one sequence, and how often the output has each (0: it is in the prompt only).

    `update` reads the tokens that are new since the last call. Prompt tokens are kept where the repetition penalty
    needs them. Preemption changes no token, so it changes nothing here.
    """

    __slots__ = ("_counts", "_num_read", "_places", "_token_ids")

    def __init__(self, prompt_token_ids: list[int], *, has_prompt: bool) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids)) if has_prompt else []
        capacity = max(_FIRST_CAPACITY, 2 * len(distinct))
        self._places = {token_id: place for place, token_id in enumerate(distinct)}
        self._token_ids = np.zeros(capacity, dtype=np.int64)
        self._token_ids[: len(distinct)] = distinct
        self._counts = np.zeros(capacity, dtype=np.float32)
        self._num_read = len(prompt_token_ids)

    def update(self, token_ids: list[int]) -> None:
        """Read what prompt and output have gained."""
        for token_id in token_ids[self._num_read :]:
            place = self._places.get(token_id)
            if place is None:
                place = self._places[token_id] = len(self._places)
                if place == len(self._token_ids):
                    self._grow()
                self._token_ids[place] = token_id
            self._counts[place] += 1.0
        self._num_read = len(token_ids)

    def _grow(self) -> None:
        self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
        self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._places)]


def apply_penalties(row: torch.Tensor, sequence: Sequence, counts: TokenCounts) -> None:
    """Change one row of logits in place: repetition (CTRL: divides what is positive, multiplies what is negative),
    then frequency and presence (OpenAI: subtracted for tokens of the output)."""
    import torch

    params = sequence.params
    counts.update(sequence.token_ids)
    token_ids = torch.from_numpy(counts.token_ids).to(row.device)
    occurrences = torch.from_numpy(counts.counts).to(row.device)
    values = row[token_ids]
    if params.repetition_penalty != 1.0:
        repetition = params.repetition_penalty
        values = torch.where(values > 0, values / repetition, values * repetition)
    if params.frequency_penalty != 0.0:
        values = values - params.frequency_penalty * occurrences
    if params.presence_penalty != 0.0:
        values = values - params.presence_penalty * (occurrences > 0)
    row[token_ids] = values


# The rules that change a sequence's logits before a token is drawn, in vLLM's order.
#
# Allowed token ids, banned words, no stop token before `min_tokens`, logit bias, penalties, DRY; last the samplers of
# llama.cpp, which leave few tokens. Each works on one row, in place; a token that a rule forbids gets minus infinity.

_FORBIDDEN = float("-inf")


def apply_rules(row: torch.Tensor, sequence: Sequence, state: SamplerState, position: int) -> None:
    """All rules of one sequence on its row of logits, float32 [vocabulary]. The new token will be at `position`."""
    params = sequence.params
    num_output_tokens = position - sequence.num_prompt_tokens
    if params.allowed_token_ids is not None:
        _keep_only(row, params.allowed_token_ids)
    if state.bad_words:
        _forbid(row, _completed_words(state.bad_words, sequence.output_token_ids))
    if num_output_tokens < params.min_tokens:
        _forbid(row, state.stop_token_ids)
    if params.logit_bias:
        token_ids = torch.tensor(list(params.logit_bias), device=row.device)
        row.index_add_(0, token_ids, torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device))
    if state.counts is not None:
        apply_penalties(row, sequence, state.counts)
    if state.repetitions is not None:
        state.repetitions.apply(row, sequence.token_ids)
    if state.truncation is not None:
        state.truncation.apply(row, sequence, position)


def forbid_on_host(row: torch.Tensor, allowed: npt.NDArray[np.bool_]) -> None:
    """Keep the tokens that a boolean mask allows; ids past its end (rows are padded) are not.

    Where the other rules forbid all of them the mask wins: what it says is the form of the text, and a text that
    follows no other rule is better than none. By NumPy, because torch's masked_fill takes five times as long on a CPU.
    """
    num_tokens = min(len(allowed), len(row))
    row[num_tokens:] = _FORBIDDEN
    values = row[:num_tokens].numpy()
    values[~allowed[:num_tokens]] = _FORBIDDEN
    if values.max() == _FORBIDDEN:
        values[allowed[:num_tokens]] = 0.0


def forbid_on_device(logits: torch.Tensor, rows: Rows[int], bits: npt.NDArray[np.uint32]) -> None:
    """The same for several rows of logits [rows, vocabulary] at once, by bit masks [rows, words]: one copy to the
    device, and no read."""
    words = torch.from_numpy(bits.view(np.int32))
    words = (words.pin_memory() if logits.device.type == "cuda" else words).to(logits.device, non_blocking=True)
    size = logits.shape[1]
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(-1) >> places) & 1).flatten(1)[:, :size].bool()
    kept = torch.nn.functional.pad(allowed, (0, size - allowed.shape[1]))
    index = torch.tensor(rows, device=logits.device)
    values = torch.where(kept, logits[index], _FORBIDDEN)
    has_any = values.amax(dim=1, keepdim=True) > _FORBIDDEN
    logits[index] = torch.where(kept & ~has_any, 0.0, values)


def _keep_only(row: torch.Tensor, token_ids: tuple[int, ...]) -> None:
    kept = torch.tensor(token_ids, dtype=torch.int64, device=row.device)
    values = row[kept]
    row.fill_(_FORBIDDEN)
    row[kept] = values


def _forbid(row: torch.Tensor, token_ids: list[int]) -> None:
    """Ids that the model has no logit for (a tokenizer may have more tokens) are forbidden as it is."""
    known = [token_id for token_id in token_ids if token_id < len(row)]
    if known:
        row.index_fill_(0, torch.tensor(known, device=row.device), _FORBIDDEN)


def _completed_words(bad_words: list[list[int]], output_token_ids: list[int]) -> list[int]:
    """The last tokens of the words whose other tokens have just been written."""
    return [
        word[-1]
        for word in bad_words
        if len(word) == 1 or (len(word) <= len(output_token_ids) + 1 and output_token_ids[1 - len(word) :] == word[:-1])
    ]
