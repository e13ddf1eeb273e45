"""Which texts share a batch."""

from __future__ import annotations

import random

import pytest
from modelserver_backends.llm.embedding.instance import plan_batch


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "max_rows", "expected"),
    [
        ([7], 4, 4, [0]),  # too long for the budget: alone
        ([5, 5, 5], 100, 2, [0, 1]),
        ([100, 4, 90, 100], 300, 8, [2, 0, 3]),
        ([4, 100, 30, 90], 1000, 8, [0, 2]),  # short ones share, whatever they are
        ([50, 101, 49, 100], 1000, 8, [2, 0]),  # twice 49 is below 100
        ([50, 101, 50, 100], 1000, 8, [0, 2, 3]),
        ([40, 60, 20], 80, 8, [2, 0]),  # two of 60 are over the budget, two of 40 are not
        ([40, 38, 39, 41, 60], 160, 8, [2, 0, 3]),
    ],
)
def test_texts_of_like_length_share_a_batch(
    lengths: list[int], max_tokens: int, max_rows: int, expected: list[int]
) -> None:
    assert plan_batch(lengths, max_tokens=max_tokens, max_rows=max_rows) == expected


def test_a_processor_that_gains_little_by_a_batch_pads_less() -> None:
    lengths = [100, 84, 82, 119, 125, 20]
    assert plan_batch(lengths, max_tokens=1000, max_rows=8) == [2, 1, 0, 3, 4]
    assert plan_batch(lengths, max_tokens=1000, max_rows=8, stretch=1.2) == [1, 0]
    assert plan_batch([20, 30, 5], max_tokens=1000, max_rows=8, stretch=1.2) == [2, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_the_first_is_never_left_behind_and_limits_hold(seed: int) -> None:
    drawn = random.Random(seed)
    waiting = [drawn.randint(1, 300) for _ in range(drawn.randint(1, 60))]
    max_tokens, max_rows = drawn.randint(1, 1000), drawn.randint(1, 20)
    num_texts, num_batches = len(waiting), 0
    while waiting:
        chosen = plan_batch(waiting, max_tokens=max_tokens, max_rows=max_rows)
        longest = max(waiting[position] for position in chosen)
        assert 0 in chosen
        assert len(set(chosen)) == len(chosen) <= max_rows
        assert len(chosen) == 1 or len(chosen) * longest <= max_tokens
        assert longest <= max(32, 2 * min(waiting[position] for position in chosen))
        waiting = [length for position, length in enumerate(waiting) if position not in chosen]
        num_batches += 1
    assert num_batches <= num_texts
