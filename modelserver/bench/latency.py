"""Summaries of latencies. Pure arithmetic over arrays of nanoseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Nanoseconds = npt.NDArray[np.int64]

PERCENTILES = (50, 90, 95, 99)
NUM_BINS = 48


def percentile(ordered: Sequence[float] | npt.NDArray[np.generic], share: float) -> float:
    """The smallest value of an ascending list that at least `share` percent of it do not exceed; 0 without values."""
    if not len(ordered):
        return 0.0
    rank = math.ceil(share / 100 * len(ordered))
    return float(ordered[min(max(rank, 1), len(ordered)) - 1])


@dataclass(frozen=True, slots=True)
class Latency:
    """Microseconds. `percentiles` has the usual ones, and what else was asked for."""

    count: int
    mean_us: float
    std_us: float
    min_us: float
    max_us: float
    percentiles: dict[float, float]
    # Edges in microseconds and counts between them, on a logarithmic scale.
    edges_us: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()

    def at(self, share: float | None) -> float:
        """A percentile; the mean for None."""
        return self.mean_us if share is None else self.percentiles[share]


def summarise(latencies: Nanoseconds, *, extra: float | None = None) -> Latency:
    """The summary of one window."""
    shares: tuple[float, ...] = PERCENTILES if extra is None or extra in PERCENTILES else (*PERCENTILES, extra)
    if not len(latencies):
        return Latency(0, 0.0, 0.0, 0.0, 0.0, dict.fromkeys(sorted(shares), 0.0))
    ordered = np.sort(latencies) / 1000.0
    edges, counts = _histogram(ordered)
    return Latency(
        count=len(ordered),
        mean_us=float(ordered.mean()),
        std_us=float(ordered.std()),
        min_us=float(ordered[0]),
        max_us=float(ordered[-1]),
        percentiles={share: percentile(ordered, share) for share in sorted(shares)},
        edges_us=edges,
        counts=counts,
    )


def _histogram(ordered: npt.NDArray[np.float64]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    low, high = max(float(ordered[0]), 1.0), max(float(ordered[-1]), 2.0)
    if high <= low:
        high = low * 1.01
    edges = np.geomspace(low * 0.999, high * 1.001, NUM_BINS + 1)
    counts, _ = np.histogram(np.maximum(ordered, low), edges)
    return tuple(float(edge) for edge in edges), tuple(int(count) for count in counts)
