"""Constrained decoding in the sampler: the distribution of the allowed tokens, on the host and on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from modelserver_backends.llm.grammar.matcher import MaskBatch, set_bits
from modelserver_backends.llm.sampler import Sampler
from modelserver_backends.llm.sampler_state import forbid_on_device, forbid_on_host
from support.sampling import make_sequence, reference_probabilities

SIZE = 12
ALLOWED = (1, 4, 7, 9)
_NONE = float("-inf")


class SetMatcher:
    """Allows a fixed set of tokens, and counts how often it was asked for all of them."""

    is_terminated = False

    def __init__(self, allowed: tuple[int, ...] = ALLOWED, size: int = SIZE) -> None:
        self._mask = np.zeros(size, dtype=np.bool_)
        self._mask[list(allowed)] = True
        self.num_masks = 0

    def accepts(self, token_id: int) -> bool:
        return token_id < len(self._mask) and bool(self._mask[token_id])

    @property
    def vocab_size(self) -> int:
        return len(self._mask)

    def fill(self, batch: MaskBatch, row: int) -> None:
        self.num_masks += 1
        set_bits(batch.bits[row], np.flatnonzero(self._mask).tolist())


def _logits() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(4)) * 1.5


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 2},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"temperature": 0.0},
        {"top_k": 3, "top_p": 0.8},
        {"logit_bias": {4: 3.0}},
    ],
)
def test_tokens_follow_the_distribution_of_the_allowed(fields: dict[str, Any]) -> None:
    num_draws, logits = 2000, _logits()
    masked = logits.clone()
    masked[[token for token in range(SIZE) if token not in ALLOWED]] = float("-inf")
    expected = reference_probabilities(masked.numpy(), make_sequence(**fields))
    sequences = [make_sequence(seed=seed, matcher=SetMatcher(), **fields) for seed in range(num_draws)]
    sampled = Sampler().sample(logits.repeat(num_draws, 1), sequences)
    counts = np.bincount([one.token_id for one in sampled], minlength=SIZE)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    assert ((counts - num_draws * expected)[possible] ** 2 / (num_draws * expected[possible])).sum() < 25.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_is_accepted_needs_no_mask(temperature: float) -> None:
    logits = torch.zeros(1, SIZE)
    logits[0, 4] = 50.0
    matcher = SetMatcher()
    sampled = Sampler().sample(logits, [make_sequence(temperature=temperature, matcher=matcher)])
    assert sampled[0].token_id == 4
    assert matcher.num_masks == 0


def test_log_probabilities_are_those_of_all_tokens() -> None:
    logits = _logits()
    sequence = make_sequence(temperature=0.0, logprobs=2, matcher=SetMatcher((1,)))
    sampled = Sampler().sample(logits.clone().unsqueeze(0), [sequence])[0]
    assert sampled.token_id == 1
    assert sampled.logprobs is not None
    expected = torch.log_softmax(logits, -1)
    assert sampled.logprobs.logprob == pytest.approx(expected[1].item(), abs=1e-5)
    assert sampled.logprobs.top[0][0] == int(logits.argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_form_wins_over_rules_that_forbid_all_of_it(temperature: float) -> None:
    sequence = make_sequence(temperature=temperature, allowed_token_ids=(2, 3), matcher=SetMatcher())
    assert Sampler().sample(torch.zeros(1, SIZE), [sequence])[0].token_id in ALLOWED


def test_rows_longer_than_the_vocabulary() -> None:
    logits = torch.zeros(1, SIZE + 20)
    logits[0, SIZE:] = 9.0
    sequence = make_sequence(temperature=0.0, matcher=SetMatcher())
    assert Sampler().sample(logits, [sequence])[0].token_id in ALLOWED


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.5, 1.0, -1.0, 2.0], [0.5, _NONE, -1.0, _NONE]),
        ([_NONE, 3.0, _NONE, 2.0], [0.0, _NONE, 0.0, _NONE]),
        ([_NONE, 0.0, 7.0, 3.0], [_NONE, _NONE, 7.0, _NONE]),
    ],
)
def test_masking_is_the_same_on_host_and_device(values: list[float], expected: list[float]) -> None:
    mask = np.array([True, False, True])
    row = torch.tensor(values)
    forbid_on_host(row, mask)
    assert row.tolist() == expected
    rows = torch.tensor([values, [5.0] * len(values), values])
    forbid_on_device(rows, [0, 2], np.array([[0b101], [0b1]], dtype=np.uint32))
    assert rows[:2].tolist() == [expected, [5.0] * len(values)]
    assert rows[2, 1:].tolist() == [_NONE] * (len(values) - 1)
