"""llama.cpp's samplers, which few requests ask for: top-n-sigma, typical, XTC, dynamic temperature, mirostat and DRY.

A sequence with one of them is truncated here, in llama.cpp's order: top_n_sigma, top_k, typical_p, top_p, min_p, XTC,
temperature; or temperature and mirostat, which then decides alone. What is left is drawn as all others are. All on the
host and in float64: the row of such a sequence is read back from a device.

Sources: top-n-sigma, arXiv 2411.07641; typical, arXiv 2202.00666; mirostat, arXiv 2007.14966. XTC and dynamic
temperature have no papers, and are defined as in llama.cpp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .draw import uniform
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from .sequence import Sequence
    from .text.tokenizer import Tokenizer

Values = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]
# The number of the random number that XTC takes of a position; those before it are for draws.
_XTC_DRAW = 2
# The tokens by which mirostat estimates how fast probabilities fall.
_MIROSTAT_TOKENS = 100
_LOWEST_TEMPERATURE = 1e-5


def has_samplers(params: SamplingParams) -> bool:
    """Whether a sequence is truncated here. Greedy ones take the maximum in any case."""
    return not params.is_greedy and (
        params.mirostat != 0
        or params.typical_p < 1.0
        or params.top_n_sigma > 0.0
        or params.xtc_probability > 0.0
        or params.dynatemp_range > 0.0
    )


def drawn_after(params: SamplingParams) -> SamplingParams:
    """The parameters of the draw from what is left."""
    return replace(params, top_k=0, top_p=1.0, min_p=0.0)


class Truncation:
    """Of one sequence."""

    __slots__ = ("_mirostat", "_params")

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._mirostat = Mirostat(params) if params.mirostat else None

    def apply(self, row: torch.Tensor, sequence: Sequence, position: int) -> None:
        """Change one row of logits in place: tokens that may not be drawn get minus infinity.

        `position` is the index that the new token will have.
        """
        import torch

        params = self._params
        logits = row.cpu().numpy().astype(np.float64)
        possible = np.flatnonzero(np.isfinite(logits))
        if not len(possible):
            return
        if self._mirostat is not None:
            scaled = logits[possible] / params.temperature
            kept = self._mirostat.keep(scaled, possible, sequence, position)
            chosen, left = possible[kept], scaled[kept]
        else:
            chosen, left = truncated(logits[possible], possible, params, uniform(sequence.seed, position, _XTC_DRAW))
        row.fill_(float("-inf"))
        # The draw divides by the temperature.
        values = torch.from_numpy((left * params.temperature).astype(np.float32))
        row[torch.from_numpy(chosen).to(row.device)] = values.to(row.device)


def truncated(logits: Values, token_ids: Indexes, params: SamplingParams, noise: float) -> tuple[Indexes, Values]:
    """The tokens that may be drawn, and their logits divided by the temperature. `noise` in [0, 1) is for XTC."""
    order = np.argsort(-logits, kind="stable")
    logits, token_ids = logits[order], token_ids[order]
    if params.top_n_sigma > 0.0:
        num = int((logits >= logits[0] - params.top_n_sigma * logits.std()).sum())
        logits, token_ids = logits[:num], token_ids[:num]
    if 0 < params.top_k < len(logits):
        logits, token_ids = logits[: params.top_k], token_ids[: params.top_k]
    if params.typical_p < 1.0:
        kept = _typical(_shares(logits), params.typical_p)
        logits, token_ids = logits[kept], token_ids[kept]
    if params.top_p < 1.0:
        num = 1 + int((np.cumsum(_shares(logits))[:-1] < params.top_p).sum())
        logits, token_ids = logits[:num], token_ids[:num]
    if params.min_p > 0.0:
        num = int((logits >= logits[0] + math.log(params.min_p)).sum())
        logits, token_ids = logits[:num], token_ids[:num]
    if noise < params.xtc_probability:
        # Of the tokens that are probable enough only the last one stays.
        num = int((_shares(logits) >= params.xtc_threshold).sum())
        first = max(0, num - 1)
        logits, token_ids = logits[first:], token_ids[first:]
    temperature = _temperature(logits, params)
    if temperature < _LOWEST_TEMPERATURE:
        return token_ids[:1], logits[:1]
    return token_ids, logits / temperature


def _shares(logits: Values) -> Values:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def _typical(shares: Values, mass: float) -> Indexes:
    """Those whose surprise is nearest to the mean surprise, until they have the mass; the most probable first."""
    surprise = -np.log(np.maximum(shares, np.finfo(np.float64).tiny))
    distance = np.abs(surprise - (shares * surprise).sum())
    order = np.argsort(distance, kind="stable")
    num = 1 + int((np.cumsum(shares[order])[:-1] < mass).sum())
    return np.sort(order[:num])


def _temperature(logits: Values, params: SamplingParams) -> float:
    """Higher where the model is less certain, within a range around the parameter."""
    if params.dynatemp_range <= 0.0 or len(logits) < 2:
        return params.temperature
    shares = _shares(logits)
    entropy = -float((shares * np.log(np.maximum(shares, np.finfo(np.float64).tiny))).sum())
    low = max(0.0, params.temperature - params.dynatemp_range)
    high = params.temperature + params.dynatemp_range
    evenness = max(0.0, entropy / math.log(len(logits)))
    return low + (high - low) * float(evenness**params.dynatemp_exponent)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one position may be, with the surprise of each token in bits."""

    position: int
    token_ids: Indexes
    surprise: Values


class Mirostat:
    """Steers the surprise of a text towards `mirostat_tau` bits a token, by bounding the surprise of the next one.

    The bound follows the token that was drawn, so it is known when the next one is chosen.
    """

    __slots__ = ("_bound", "_offer", "_params")

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._bound = 2.0 * params.mirostat_tau
        self._offer: _Offer | None = None

    def keep(self, scaled: Values, token_ids: Indexes, sequence: Sequence, position: int) -> Indexes:
        """The indexes of the tokens that may be drawn. `scaled` are logits divided by the temperature."""
        self._learn(sequence)
        order = np.argsort(-scaled, kind="stable")
        shares = _shares(scaled[order])
        kept = order[: self._num_kept(shares)]
        left = _shares(scaled[kept])
        bits = -np.log2(np.maximum(left, np.finfo(np.float64).tiny))
        self._offer = _Offer(position, token_ids[kept], bits)
        return kept

    def _learn(self, sequence: Sequence) -> None:
        """Move the bound by what became of the last offer."""
        offer = self._offer
        if offer is None or offer.position >= len(sequence.token_ids):
            return
        # A grammar may have chosen another token.
        for surprise in offer.surprise[offer.token_ids == sequence.token_ids[offer.position]].tolist():
            self._bound -= self._params.mirostat_eta * (surprise - self._params.mirostat_tau)
        self._offer = None

    def _num_kept(self, shares: Values) -> int:
        """How many of the most probable tokens; `shares` are in falling order."""
        if self._params.mirostat == 2:
            return max(1, int((-np.log2(np.maximum(shares, np.finfo(np.float64).tiny)) <= self._bound).sum()))
        # Probabilities are taken to fall as a power of their rank, which the first ones tell.
        head = shares[:_MIROSTAT_TOKENS]
        head = head[head > 0.0]
        if len(head) < 2:
            return 1
        ranks = np.arange(len(head) - 1)
        steps = np.log((ranks + 2) / (ranks + 1))
        exponent = float((steps * np.log(head[:-1] / head[1:])).sum() / (steps * steps).sum())
        if exponent <= 0.0:
            return len(shares)
        excess = exponent - 1.0
        tail = 1.0 - len(shares) ** -excess if excess else 0.0
        base = 2.0**self._bound * (excess / tail if tail else 1.0 / math.log(len(shares)))
        return min(len(shares), max(1, int(base ** (1.0 / exponent)))) if base > 0.0 else 1


# DRY ("don't repeat yourself"): a token that would extend a repetition loses the more, the longer the repetition is.
#
# Where the end of a text occurred before, the token that followed then would repeat it. If n tokens are repeated
# already, it loses `multiplier * base ** (n - allowed_length)`, for n of at least `allowed_length`. Repetitions end at
# breakers, such as line breaks. Defined by oobabooga/text-generation-webui's pull request 5677, which names no paper.

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
