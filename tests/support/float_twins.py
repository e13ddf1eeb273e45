"""What our engine makes of a checkpoint, beside what transformers makes of the weights that it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.generations import generate, loaded_engine, random_prompts
from support.tiny_checkpoints import reference_logprobs, reference_tokens


def assert_is_its_twin(packed: Path, twin: Path, *, num_prompts: int = 3, num_tokens: int = 6, **options: Any) -> None:
    """Greedy tokens equal those of the float twin in transformers, and so do their log-probabilities, nearly."""
    prompts = random_prompts(num_prompts)
    with loaded_engine(packed, block_size=8, **options) as engine:
        results = generate(engine, prompts, num_tokens)
    for prompt, (tokens, logprobs) in zip(prompts, results, strict=True):
        assert tokens == reference_tokens(twin, prompt, num_tokens)
        expected = reference_logprobs(twin, prompt + tokens)[len(prompt) - 1 : -1]
        own = [float(row[token]) for row, token in zip(expected, tokens, strict=True)]
        assert logprobs == pytest.approx(own, abs=1e-3)
