"""Percentiles and histograms."""

from __future__ import annotations

import numpy as np
import pytest

from modelserver.bench.window import percentile, summarise


@pytest.mark.parametrize(
    ("share", "expected"), [(50, 50), (90, 90), (99, 99), (99.5, 100), (100, 100), (1, 1), (0.1, 1)]
)
def test_percentiles_are_values_that_were_measured(share: float, expected: float) -> None:
    assert percentile(list(range(1, 101)), share) == expected


def test_percentiles_of_few_values() -> None:
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0], 50) == 1.0
    assert percentile([1.0, 2.0], 51) == 2.0
    assert percentile([], 99) == 0.0


def test_a_summary_is_in_microseconds() -> None:
    latency = summarise(np.array([1000, 3000, 2000, 4000]), extra=75)
    assert (latency.count, latency.mean_us, latency.min_us, latency.max_us) == (4, 2.5, 1.0, 4.0)
    assert latency.std_us == pytest.approx(1.118, abs=0.001)
    assert latency.percentiles == {50: 2.0, 75: 3.0, 90: 4.0, 95: 4.0, 99: 4.0}
    assert latency.at(None) == 2.5
    assert latency.at(75) == 3.0


def test_nothing_measured_is_zero() -> None:
    latency = summarise(np.empty(0, dtype=np.int64))
    assert (latency.count, latency.at(None), latency.at(99)) == (0, 0.0, 0.0)


@pytest.mark.parametrize("values", [[5000], [1], [900, 1_000_000, 2_000_000_000], list(range(1, 5000))])
def test_a_histogram_has_every_request(values: list[int]) -> None:
    latency = summarise(np.array(values))
    assert sum(latency.counts) == len(values)
    assert len(latency.edges_us) == len(latency.counts) + 1
    assert list(latency.edges_us) == sorted(latency.edges_us)
