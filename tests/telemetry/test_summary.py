from __future__ import annotations

import math

import numpy as np
import pytest

from modelserver.telemetry.summary import Summary

QUANTILES = (0.5, 0.9, 0.999)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def summary(clock: Clock) -> Summary:
    return Summary(QUANTILES, clock)


def quantiles(summary: Summary) -> dict[float, float]:
    return dict(summary.snapshot().quantiles_us)


def test_nothing_has_no_quantiles(summary: Summary) -> None:
    snapshot = summary.snapshot()
    assert (snapshot.count, snapshot.sum_us) == (0, 0)
    assert all(map(math.isnan, quantiles(summary).values()))


@pytest.mark.parametrize("scale", [1e4, 1e6, 1e9, 1e10])
def test_quantiles_are_within_a_percent_of_the_truth(summary: Summary, scale: float) -> None:
    values = (np.random.default_rng(7).lognormal(0, 1, 5000) * scale).astype(np.int64)
    for part in np.split(values, 10):
        summary.add_all(part)
    assert summary.snapshot().count == 5000
    assert summary.snapshot().sum_us == values.sum() // 1000
    for quantile, found in quantiles(summary).items():
        truth = np.quantile(values, quantile, method="inverted_cdf") / 1000
        assert found == pytest.approx(truth, rel=0.011)


def test_what_is_too_short_or_too_long_has_an_end(summary: Summary) -> None:
    summary.add_all([0, 1, 999])
    assert set(quantiles(summary).values()) == {0.0}
    summary.add_all([1 << 62] * 100)
    assert quantiles(summary)[0.5] > 1e9


def test_a_minute_is_remembered(summary: Summary, clock: Clock) -> None:
    summary.add_all([1_000_000])
    clock.now_s += 30
    summary.add_all([9_000_000] * 9)
    assert quantiles(summary)[0.5] == pytest.approx(9000, rel=0.011)
    clock.now_s += 29
    summary.add_all([1_000_000] * 100)
    assert quantiles(summary)[0.5] == pytest.approx(1000, rel=0.011)
    clock.now_s += 31
    assert quantiles(summary)[0.9] == pytest.approx(1000, rel=0.011)
    clock.now_s += 1e6
    assert math.isnan(quantiles(summary)[0.5])
    assert summary.snapshot().count == 110, "counts and sums go on"
