"""DRY ("don't repeat yourself"): a token that would extend a repetition loses the more, the longer the repetition is.

Where the end of a text occurred before, the token that followed then would repeat it. If n tokens are repeated
already, it loses `multiplier * base ** (n - allowed_length)`, for n of at least `allowed_length`. Repetitions end at
breakers, such as line breaks. Defined by oobabooga/text-generation-webui's pull request 5677, which names no paper.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from .sampling_params import SamplingParams
    from .text.tokenizer import Tokenizer

_FIRST_CAPACITY = 256
# The greatest penalty, so that logits stay finite.
_MOST = 1e30


def breaker_ids(breakers: tuple[str, ...], tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that have one of these texts in them."""
    wanted = [breaker.encode() for breaker in breakers if breaker]
    if not wanted:
        return frozenset()
    pieces = tokenizer.pieces.tolist()
    return frozenset(token_id for token_id, piece in enumerate(pieces) if any(breaker in piece for breaker in wanted))


class Repetitions:
    """How much of the end of one sequence also ends at each of its earlier tokens; kept up to date token by token."""

    __slots__ = ("_breakers", "_lens", "_num_read", "_params", "_token_ids")

    def __init__(self, params: SamplingParams, breakers: frozenset[int]) -> None:
        self._params = params
        self._breakers = breakers
        self._token_ids = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        # Of each token but the last: the length of the longest text that ends there and at the end, too.
        self._lens = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._num_read = 0

    def apply(self, row: torch.Tensor, token_ids: list[int]) -> None:
        """Change one row of logits in place; `token_ids` are the sequence so far."""
        import torch

        found = self.penalties(token_ids)
        if found:
            places = torch.tensor(list(found), device=row.device)
            row[places] -= torch.tensor(list(found.values()), dtype=row.dtype, device=row.device)

    def penalties(self, token_ids: list[int]) -> dict[int, float]:
        """What each token loses that would go on with a repetition."""
        self._update(token_ids)
        params, end = self._params, self._num_read - 1
        window = params.dry_penalty_last_n
        start = 0 if window < 0 else max(0, self._num_read - window)
        if end <= start:
            return {}
        lens = np.minimum(self._lens[start:end], np.arange(1, end - start + 1))
        longest: dict[int, int] = {}
        for place in np.flatnonzero(lens >= max(1, params.dry_allowed_length)).tolist():
            following = int(self._token_ids[start + place + 1])
            if following not in self._breakers:
                longest[following] = max(longest.get(following, 0), int(lens[place]))
        return {token_id: self._penalty(length) for token_id, length in longest.items()}

    def _penalty(self, length: int) -> float:
        params = self._params
        exponent = length - params.dry_allowed_length
        most = (
            math.log(_MOST / params.dry_multiplier) / math.log(params.dry_base) if params.dry_base > 1.0 else math.inf
        )
        return _MOST if exponent > most else params.dry_multiplier * params.dry_base**exponent

    def _update(self, token_ids: list[int]) -> None:
        if self._num_read == 0 and len(token_ids) > 1:
            self._read_all(token_ids)
        for token_id in token_ids[self._num_read :]:
            self._append(token_id)

    def _append(self, token_id: int) -> None:
        num = self._num_read
        if num == len(self._token_ids):
            self._reserve(2 * num)
        if token_id in self._breakers:
            self._lens[:num] = 0
        elif num:
            # A text that ends at both places goes on if the next tokens are equal.
            self._lens[1:num] = self._lens[: num - 1] + 1
            self._lens[0] = 1
            self._lens[:num][self._token_ids[:num] != token_id] = 0
        self._token_ids[num] = token_id
        self._lens[num] = 0
        self._num_read += 1

    def _read_all(self, token_ids: list[int]) -> None:
        """The same for a whole prompt in linear time, by the Z function of the text read backwards."""
        num = len(token_ids)
        self._reserve(2 * num)
        backwards = token_ids[::-1]
        since_breaker = next((at for at, token_id in enumerate(backwards) if token_id in self._breakers), num)
        lens = [0] * num
        left = right = 0
        for at in range(1, num):
            length = min(right - at, lens[at - left]) if at < right else 0
            while at + length < num and backwards[length] == backwards[at + length]:
                length += 1
            lens[at] = length
            if at + length > right:
                left, right = at, at + length
        self._token_ids[:num] = token_ids
        self._lens[:num] = np.minimum(lens[::-1], since_breaker)
        self._num_read = num

    def _reserve(self, size: int) -> None:
        if size > len(self._token_ids):
            self._token_ids = _grown(self._token_ids, size)
            self._lens = _grown(self._lens, size)


def _grown(values: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    return np.concatenate([values, np.zeros(size - len(values), dtype=np.int64)])
