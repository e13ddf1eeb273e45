"""Sequences to sample for, and the sampling rules of vLLM written down one after the other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Tokens
from typing import Any

import numpy as np
from modelserver_backends.llm.sampling_params import SamplingParams
from modelserver_backends.llm.sequence import Sequence


def make_sequence(
    params: SamplingParams | None = None,
    *,
    prompt: Tokens[int] = (1, 2, 3),
    output: Tokens[int] = (),
    seed: int = 0,
    matcher: Any = None,
    **fields: Any,
) -> Sequence:
    return Sequence(
        seq_id=seed,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        params=params if params is not None else SamplingParams(**fields),
        seed=seed,
        matcher=matcher,
    )


def reference_probabilities(logits: np.ndarray, sequence: Sequence, eos_token_ids: Tokens[int] = ()) -> np.ndarray:
    """What each token's probability is: float64, step by step, nothing vectorised and nothing shared with ours.

    A greedy sequence has all its mass on one token. Bad words are single tokens here, given as their number.
    """
    params, values = sequence.params, [float(value) for value in logits]
    output = sequence.output_token_ids
    if params.allowed_token_ids is not None:
        values = [value if token in params.allowed_token_ids else -math.inf for token, value in enumerate(values)]
    if len(output) < params.min_tokens:
        for token in [*([] if params.ignore_eos else eos_token_ids), *params.stop_token_ids]:
            values[token] = -math.inf
    for token, bias in params.logit_bias.items():
        values[token] += bias
    counts = Counter(output)
    for token in set(sequence.token_ids):
        values[token] = (
            values[token] / params.repetition_penalty
            if values[token] > 0
            else values[token] * params.repetition_penalty
        )
    for token, count in counts.items():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.is_greedy:
        greedy = np.zeros(len(values))
        greedy[max(range(len(values)), key=values.__getitem__)] = 1.0
        return greedy
    values = [value / params.temperature for value in values]
    best = max(values)
    mass = [math.exp(value - best) for value in values]
    mass = [one if one >= params.min_p else 0.0 for one in mass]
    if 0 < params.top_k < len(mass):
        least = sorted(mass, reverse=True)[params.top_k - 1]
        mass = [one if one >= least else 0.0 for one in mass]
    total = sum(mass)
    kept = [one if sum(other for other in mass if other > one) < params.top_p * total else 0.0 for one in mass]
    return np.array(kept) / sum(kept)
