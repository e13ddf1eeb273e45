"""Which tokens a sequence has seen, kept up to date token by token, and the penalties that follow from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from .sequence import Sequence

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
