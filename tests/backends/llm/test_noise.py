"""Noise is uniform, and depends on seed, position and draw only."""

from __future__ import annotations

import numpy as np
import pytest
from modelserver_backends.llm.draw import uniform, uniforms


def _chi_square(values: list[float], num_cells: int = 64) -> float:
    counts, _ = np.histogram(values, bins=num_cells, range=(0.0, 1.0))
    expected = len(values) / num_cells
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "keys",
    [
        [(0, position, 0) for position in range(20000)],
        [(seed, 0, 0) for seed in range(20000)],
        [(1 << 63, position % 100, position // 100) for position in range(20000)],
        [(seed, seed, 0) for seed in range(20000)],
    ],
    ids=["positions", "seeds", "draws", "diagonal"],
)
def test_it_is_uniform(keys: list[tuple[int, int, int]]) -> None:
    values = [uniform(*key) for key in keys]
    assert all(0.0 <= value < 1.0 for value in values)
    assert len(set(values)) == len(values)
    assert _chi_square(values) < 120.0  # 63 degrees of freedom: one in 20,000 is above


def test_neighbours_have_nothing_in_common() -> None:
    here = np.array([uniform(seed, position) for seed in range(100) for position in range(100)])
    for other in (
        [uniform(seed + 1, position) for seed in range(100) for position in range(100)],
        [uniform(seed, position + 1) for seed in range(100) for position in range(100)],
        [uniform(seed, position, 1) for seed in range(100) for position in range(100)],
    ):
        assert abs(np.corrcoef(here, np.array(other))[0, 1]) < 0.04


def test_a_seed_may_be_any_integer() -> None:
    assert uniform(-1, 0) == uniform((1 << 64) - 1, 0)
    assert uniform(5, 7) == uniform(5, 7) != uniform(7, 5)


def test_a_step_draws_the_same_numbers_at_once() -> None:
    seeds, positions = [0, 5, -1, (1 << 63) - 1, 7], [0, 3, 2**31, 1, 9]
    assert uniforms(seeds, positions).tolist() == [uniform(*key) for key in zip(seeds, positions, strict=True)]
