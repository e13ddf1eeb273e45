"""Counts of numbers between bounds, made of many numbers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from modelserver.config.schema import ModelConfig

if TYPE_CHECKING:
    from prometheus_client.core import Metric

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

    def quantile(self, share: float) -> float:
        """The quantile (0 to 1), interpolated linearly between two bounds.

        0 without values; the last bound if the quantile lies above it.
        """
        rank = share * self.count
        below = 0
        for index, count in enumerate(self.counts[:-1]):
            if count and below + count >= rank:
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * (rank - below) / count
            below += count
        return self.bounds[-1] if self.count else 0.0

    def since(self, before: HistogramSnapshot) -> HistogramSnapshot:
        """The counts since `before`, a snapshot of the same histogram."""
        counts = tuple(now - then for now, then in zip(self.counts, before.counts, strict=True))
        return HistogramSnapshot(self.bounds, counts, self.sum - before.sum)

    def add_to(self, metric: Metric, labels: Mapping[str, str]) -> None:
        """As samples of a Prometheus histogram, whose counts are cumulative."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            limit = "+Inf" if bound == float("inf") else repr(float(bound))
            metric.add_sample(f"{metric.name}_bucket", {**labels, "le": limit}, total)
        metric.add_sample(f"{metric.name}_count", dict(labels), total)
        metric.add_sample(f"{metric.name}_sum", dict(labels), self.sum)


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


# Metric options in a model's config.
FIRST_RESPONSE_MS = "nv_inference_first_response_histogram_ms"
# Triton's.
_FIRST_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)


def first_response_bounds_ms(config: ModelConfig) -> tuple[float, ...]:
    """The upper bounds of the buckets of first-response times: the config's, or Triton's."""
    for control in config.model_metrics.metric_control if config.model_metrics is not None else ():
        family = control.metric_identifier.family if control.metric_identifier is not None else ""
        if family == FIRST_RESPONSE_MS and control.histogram_options is not None:
            return control.histogram_options.buckets
    return _FIRST_RESPONSE_BOUNDS_MS
