"""What the sampler knows of one sequence besides its parameters, made at its first token and kept in the sequence:
penalties, and the rules that change logits before a token is drawn."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from .attention.paged import IntArray, copied_together
from .samplers import Repetitions, Truncation, breaker_ids, drawn_after, has_samplers
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from .sequence import Sequence
    from .text.tokenizer import Tokenizer


class SamplerState:
    """`bad_words`: token ids of each banned word. `stop_token_ids`: those that must not come before `min_tokens`.
    `allowed_token_ids`: None for all. `bias`: token ids, and what is added to their logits.

    `is_edited`: some rule changes this sequence's logits before a token is drawn. `drawn` are the parameters of the
    draw itself: the sequence's, unless `truncation` has applied some of them before.
    """

    __slots__ = (
        "allowed_token_ids",
        "bad_words",
        "bias",
        "counts",
        "drawn",
        "is_edited",
        "repetitions",
        "stop_token_ids",
        "truncation",
    )

    def __init__(self, sequence: Sequence, eos_token_ids: frozenset[int], tokenizer: Tokenizer | None) -> None:
        params = sequence.params
        self.bad_words = _bad_word_ids(params.bad_words, tokenizer)
        eos = frozenset() if params.ignore_eos else eos_token_ids
        stop_token_ids = sorted(eos.union(params.stop_token_ids)) if params.min_tokens > 0 else []
        self.stop_token_ids = np.array(stop_token_ids, dtype=np.int64)
        self.allowed_token_ids: IntArray | None = None
        if params.allowed_token_ids is not None:
            self.allowed_token_ids = np.array(params.allowed_token_ids, dtype=np.int64)
        self.bias: tuple[IntArray, npt.NDArray[np.float64]] | None = None
        if params.logit_bias:
            biases = list(params.logit_bias.values())
            self.bias = np.array(list(params.logit_bias), dtype=np.int64), np.array(biases, dtype=np.float64)
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
            or stop_token_ids
            or self.counts is not None
            or self.bias is not None
            or self.allowed_token_ids is not None
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
# A token's count stands above its id, or above its index in the logits of all rows.
_INDEX_BITS = 40
_ONE = 1 << _INDEX_BITS


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


class TokenCounts:
    """The distinct tokens of one sequence, and how often the output has each (0: it is in the prompt only).

    `update` reads the tokens that are new since the last call. Prompt tokens are kept where the repetition penalty
    needs them. Preemption changes no token, so it changes nothing here.
    """

    __slots__ = ("_num_read", "_places", "_words")

    def __init__(self, prompt_token_ids: list[int], *, has_prompt: bool) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids)) if has_prompt else []
        self._places = {token_id: place for place, token_id in enumerate(distinct)}
        self._words = np.zeros(max(_FIRST_CAPACITY, 2 * len(distinct)), dtype=np.int64)
        self._words[: len(distinct)] = distinct
        self._num_read = len(prompt_token_ids)

    def update(self, token_ids: list[int]) -> None:
        """Read what prompt and output have gained."""
        for token_id in token_ids[self._num_read :]:
            place = self._places.get(token_id)
            if place is None:
                place = self._places[token_id] = len(self._places)
                if place == len(self._words):
                    self._words = np.concatenate([self._words, np.zeros_like(self._words)])
                self._words[place] = token_id
            self._words[place] += _ONE
        self._num_read = len(token_ids)

    @property
    def words(self) -> IntArray:
        """Of each token its id, and above `_INDEX_BITS` its count."""
        return self._words[: len(self._places)]


# The rules that change logits before a token is drawn, in vLLM's order.
#
# Allowed token ids, banned words, no stop token before `min_tokens`, logit bias, penalties, DRY; last the samplers of
# llama.cpp, which leave few tokens. A token that a rule forbids gets minus infinity.

_FORBIDDEN = float("-inf")
# Counts whose tokens are penalised at once: what fits into a cache, and what bounds the memory of a device.
_MOST_ON_HOST, _MOST_ON_DEVICE = 1 << 13, 1 << 18
_NOTHING = np.empty(0, dtype=np.int64)


def apply_rules(
    logits: torch.Tensor, sequences: Rows[Sequence], states: Rows[SamplerState], positions: Rows[int]
) -> None:
    """All rules of a step's sequences on their logits, float32 [rows, vocabulary], contiguous. The new tokens will be
    at `positions`.

    All rows are changed by the same few operations. What these need goes to a device by one copy, and the host waits
    for nothing, but for rows with a sampler of llama.cpp, which it reads.
    """
    edits = Edits(*logits.shape)
    for row, (sequence, state, position) in enumerate(zip(sequences, states, positions, strict=True)):
        if state.is_edited:
            edits.add(row, sequence, state, position)
    if logits.device.type == "cpu":
        edits.apply_on_host(logits)
    else:
        edits.apply_on_device(logits)
    for row, state in enumerate(states):
        if state.truncation is not None:
            state.truncation.apply(logits[row], sequences[row], positions[row])


class Edits:
    """What the rules of a step change, as indexes of its flat logits [rows * vocabulary]. A rule names no index twice,
    unless it sets all to one value."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._bound_rows: list[int] = []
        self._allowed: list[IntArray] = []
        self._forbidden: list[IntArray] = []
        self._biased: list[IntArray] = []
        self._biases: list[npt.NDArray[np.float64]] = []
        self._counts: list[IntArray] = []
        # Repetition, frequency and presence penalty of each row.
        self._penalties = np.zeros((3, num_rows))
        self._penalties[0] = 1.0
        self._repeated: list[IntArray] = []
        self._losses: list[npt.NDArray[np.float64]] = []

    def add(self, row: int, sequence: Sequence, state: SamplerState, position: int) -> None:
        params = sequence.params
        start = row * self._vocab_size
        if state.allowed_token_ids is not None:
            self._bound_rows.append(row)
            self._allowed.append(state.allowed_token_ids + start)
        if state.bad_words:
            self._forbid(start, np.array(_completed_words(state.bad_words, sequence.output_token_ids), dtype=np.int64))
        if position - sequence.num_prompt_tokens < params.min_tokens:
            self._forbid(start, state.stop_token_ids)
        if state.bias is not None:
            self._biased.append(state.bias[0] + start)
            self._biases.append(state.bias[1])
        if state.counts is not None:
            state.counts.update(sequence.token_ids)
            self._counts.append(state.counts.words + start)
            self._penalties[:, row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        if state.repetitions is not None:
            found = state.repetitions.penalties(sequence.token_ids)
            if found:
                self._repeated.append(np.array(list(found), dtype=np.int64) + start)
                self._losses.append(np.array(list(found.values()), dtype=np.float64))

    def _forbid(self, start: int, token_ids: IntArray) -> None:
        """Ids that the model has no logit for (a tokenizer may have more tokens) are forbidden as it is."""
        self._forbidden.append(token_ids[token_ids < self._vocab_size] + start)

    def apply_on_host(self, logits: torch.Tensor) -> None:
        """By NumPy, as torch would wake its threads for each of these small operations."""
        with np.errstate(all="ignore"):
            self._apply(np, logits.numpy(), self._words(), _MOST_ON_HOST)

    def apply_on_device(self, logits: torch.Tensor) -> None:
        self._apply(torch, logits, copied_together(self._words(), logits.device), _MOST_ON_DEVICE)

    def _words(self) -> list[IntArray]:
        return [
            np.array(self._bound_rows, dtype=np.int64),
            _joined(self._allowed),
            _joined(self._forbidden),
            _joined(self._biased),
            _joined(self._biases),
            _joined(self._counts),
            self._penalties.view(np.int64).ravel() if self._counts else _NOTHING,
            _joined(self._repeated),
            _joined(self._losses),
        ]

    def _apply(self, library: Any, logits: Any, words: Rows[Any], most_counts: int) -> None:
        """In the language that NumPy and torch have in common: `library` is that of the arrays."""
        bound_rows, allowed, forbidden, biased, biases, counts, penalties, repeated, losses = words
        flat = logits.reshape(-1)
        if len(allowed):
            values = flat[allowed]
            logits[bound_rows] = _FORBIDDEN
            flat[allowed] = values
        if len(forbidden):
            flat[forbidden] = _FORBIDDEN
        if len(biased):
            flat[biased] += library.asarray(biases.view(library.float64), dtype=library.float32)
        if len(counts):
            columns = library.asarray(penalties.view(library.float64), dtype=library.float32).reshape(3, -1)
            for first in range(0, len(counts), most_counts):
                self._penalise(library, flat, counts[first : first + most_counts], columns)
        if len(repeated):
            flat[repeated] -= library.asarray(losses.view(library.float64), dtype=library.float32)

    def _penalise(self, library: Any, flat: Any, counts: Any, columns: Any) -> None:
        """Repetition (CTRL: divides what is positive, multiplies what is negative), then frequency and presence
        (OpenAI: subtracted for tokens of the output)."""
        index = counts & (_ONE - 1)
        repetition, frequency, presence = columns[:, index // self._vocab_size]
        occurrences = library.asarray(counts >> _INDEX_BITS, dtype=library.float32)
        values = flat[index]
        values = library.where(values > 0, values / repetition, values * repetition)
        values -= frequency * occurrences
        values -= presence * (occurrences > 0)
        flat[index] = values


def _joined(arrays: list[npt.NDArray[Any]]) -> IntArray:
    """As 64-bit words."""
    return np.concatenate(arrays).view(np.int64) if arrays else _NOTHING


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
    """The same for several rows of logits [rows, vocabulary] at once, by bit masks [rows, words], without waiting for
    the device."""
    words = torch.from_numpy(bits.view(np.int32))
    words = (words if logits.device.type == "cpu" else words.pin_memory()).to(logits.device, non_blocking=True)
    size = logits.shape[1]
    places = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(-1) >> places) & 1).flatten(1)[:, :size].bool()
    kept = torch.nn.functional.pad(allowed, (0, size - allowed.shape[1]))
    (index,) = copied_together([np.array(rows, dtype=np.int64)], logits.device)
    values = torch.where(kept, logits[index], _FORBIDDEN)
    has_any = values.amax(dim=1, keepdim=True) > _FORBIDDEN
    logits[index] = torch.where(kept & ~has_any, 0.0, values)


def _completed_words(bad_words: list[list[int]], output_token_ids: list[int]) -> list[int]:
    """The last tokens of the words whose other tokens have just been written."""
    return [
        word[-1]
        for word in bad_words
        if len(word) == 1 or (len(word) <= len(output_token_ids) + 1 and output_token_ids[1 - len(word) :] == word[:-1])
    ]
