"""How much a quantized model still says what its source says: perplexity and next tokens on a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modelserver.backend import InvalidArgumentError

from .checkpoint import Checkpoint, open_checkpoint
from .llm import LLM
from .plan import TokenLogprobs
from .sampling_params import SamplingParams

_NUM_TOP = 20
_WINDOW = 512
_NUM_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class QuantizationQuality:
    """`agreement`: the share of positions at which the likeliest token is the same.

    `divergence`: the mean KL divergence in nats, over the tokens that are among the likeliest of both, with all others
    as one. That of the whole distributions is at least as large.
    """

    num_tokens: int
    perplexity_before: float
    perplexity_after: float
    agreement: float
    divergence: float


def compare_on_text(source: Path, target: Path, text: str) -> QuantizationQuality:
    """Both models read at most the first 4096 tokens of a text. InvalidArgumentError for one of fewer than two."""
    with open_checkpoint(source) as checkpoint:
        windows = windows_of(checkpoint, text)
    before, after = _read(source, windows), _read(target, windows)
    pairs = list(zip(before, after, strict=True))
    return QuantizationQuality(
        num_tokens=len(pairs),
        perplexity_before=_perplexity(before),
        perplexity_after=_perplexity(after),
        agreement=sum(one.top[0][0] == other.top[0][0] for one, other in pairs) / len(pairs),
        divergence=sum(_divergence(one, other) for one, other in pairs) / len(pairs),
    )


def windows_of(checkpoint: Checkpoint, text: str) -> list[list[int]]:
    """The first 4096 tokens of a text in pieces. InvalidArgumentError for a text of fewer than two."""
    from .text.tokenizer import Tokenizer

    token_ids = Tokenizer.from_checkpoint(checkpoint).encode(text)[: _WINDOW * _NUM_WINDOWS]
    windows = [token_ids[start : start + _WINDOW] for start in range(0, len(token_ids), _WINDOW)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise InvalidArgumentError("the text to compare on has fewer than two tokens")
    return windows


def _read(directory: Path, windows: Sequence[list[int]]) -> list[TokenLogprobs]:
    """A model's predictions of each token of a window, except the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=_NUM_TOP)
    with LLM(directory, max_model_len=max(map(len, windows)) + 1) as model:
        outputs = model.generate(list(windows), params)
    return [entry for output in outputs for entry in output.prompt_logprobs or () if entry is not None]


def _perplexity(entries: Sequence[TokenLogprobs]) -> float:
    return math.exp(-sum(entry.logprob for entry in entries) / len(entries))


def _divergence(before: TokenLogprobs, after: TokenLogprobs) -> float:
    others = dict(after.top)
    shared = [(logprob, others[token]) for token, logprob in before.top if token in others]
    total = sum(math.exp(own) * (own - other) for own, other in shared)
    rest_before = 1.0 - sum(math.exp(own) for own, _ in shared)
    rest_after = 1.0 - sum(math.exp(other) for _, other in shared)
    if rest_before > 0.0 and rest_after > 0.0:
        total += rest_before * math.log(rest_before / rest_after)
    return max(total, 0.0)
