"""Counts of numbers between bounds, made of many numbers at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Counts between bounds (not cumulative); the last count is for values above the last bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Bucket counters in integers: `scale` converts what is added to the unit of the bounds."""

    __slots__ = ("_bounds", "_counts", "_scale", "_scaled_bounds", "_sum")

    def __init__(self, bounds: Sequence[float], scale: int = 1) -> None:
        self._bounds = tuple(bounds)
        self._scale = scale
        self._scaled_bounds = np.array([round(bound * scale) for bound in bounds], np.int64)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0

    def add_all(self, values: Sequence[int] | Numbers) -> int:
        """Count the values, and return their sum."""
        array = np.asarray(values, np.int64)
        buckets = np.searchsorted(self._scaled_bounds, array, side="left")
        counts = np.bincount(buckets, minlength=len(self._counts)).tolist()
        self._counts = [old + new for old, new in zip(self._counts, counts, strict=True)]
        total = int(array.sum())
        self._sum += total
        return total

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._sum / self._scale)
