"""Arrivals: their rate, their spread, and how several processes share them."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from modelserver.bench.player import NS_PER_S, due_times
from modelserver.bench.work import OpenLoad, Share

ALONE = Share(0, 1)
START = 5 * NS_PER_S


def times(load: OpenLoad, count: int, *, share: Share = ALONE, seed: int = 1) -> np.ndarray:
    return np.array(list(islice(due_times(load, share, seed), count)))


def test_a_constant_rate_drifts_nowhere() -> None:
    found = times(OpenLoad(rate=3, start_ns=START), 3001)
    assert found[0] == START
    assert found[3000] == START + 1000 * NS_PER_S
    assert set(np.diff(found)) <= {333_333_333, 333_333_334}


def test_poisson_gaps_are_exponential() -> None:
    """Mean and standard deviation are equal, and the share of gaps above the mean is 1/e."""
    gaps = np.diff(times(OpenLoad(rate=1000, start_ns=START, is_poisson=True), 50_000))
    mean = NS_PER_S / 1000
    assert gaps.mean() == pytest.approx(mean, rel=0.02)
    assert gaps.std() == pytest.approx(mean, rel=0.03)
    assert (gaps > mean).mean() == pytest.approx(np.exp(-1), abs=0.01)


def test_poisson_counts_have_the_variance_of_their_mean() -> None:
    found = times(OpenLoad(rate=1000, start_ns=0, is_poisson=True), 50_000)
    counts = np.bincount((found // (NS_PER_S // 100)).astype(int))[:4000]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1)


def test_a_seed_repeats_itself_and_another_does_not() -> None:
    load = OpenLoad(rate=10, start_ns=START, is_poisson=True)
    assert (times(load, 50) == times(load, 50)).all()
    assert (times(load, 50) != times(load, 50, seed=2)).any()


def test_intervals_are_repeated() -> None:
    found = times(OpenLoad(rate=1, start_ns=START, intervals_ns=(10, 30)), 6)
    assert (found - START).tolist() == [0, 10, 40, 50, 80, 90]


@pytest.mark.parametrize(
    "load", [OpenLoad(rate=7, start_ns=START), OpenLoad(rate=1, start_ns=START, intervals_ns=(5, 9))]
)
def test_processes_share_a_schedule_without_gap_or_overlap(load: OpenLoad) -> None:
    parts = [times(load, 20, share=Share(index, 3)) for index in range(3)]
    assert sorted(np.concatenate(parts)) == times(load, 60).tolist()


def test_processes_together_have_the_rate_of_a_poisson_load() -> None:
    load = OpenLoad(rate=1000, start_ns=0, is_poisson=True)
    parts = [times(load, 20_000, share=Share(index, 4)) for index in range(4)]
    together = np.sort(np.concatenate(parts))
    gaps = np.diff(together[together <= min(part[-1] for part in parts)])
    assert gaps.mean() == pytest.approx(NS_PER_S / 1000, rel=0.03)
    assert gaps.std() == pytest.approx(NS_PER_S / 1000, rel=0.04)


def test_shares_add_up() -> None:
    for total in (0, 1, 5, 16, 17):
        assert sum(Share(index, 4).of(total) for index in range(4)) == total
