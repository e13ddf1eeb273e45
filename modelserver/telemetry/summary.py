"""Quantiles of the durations of the last minute, as Triton's summaries have them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from modelserver.errors import InvalidArgumentError
from modelserver.telemetry.histogram import Numbers

# Triton's.
DEFAULT_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)

_NS_PER_US = 1000
_WINDOW_S = 60.0
_NUM_SLICES = 6
_SLICE_S = _WINDOW_S / _NUM_SLICES
# Steps of 2 % from 1 µs to about 20 minutes: a value between two of them is within 1 % of the true one.
_STEP = math.log(1.02)
_NUM_STEPS = 1060


def parse_quantiles(text: str) -> tuple[float, ...]:
    """The quantiles in Triton's `<quantile>:<error>,...`. The errors are ignored: all quantiles are equally exact.

    Raises InvalidArgumentError.
    """
    quantiles = []
    for pair in text.split(","):
        try:
            quantile, _ = map(float, pair.split(":"))
        except ValueError:
            raise _unusable(text) from None
        if not 0 < quantile < 1:
            raise _unusable(text)
        quantiles.append(quantile)
    return tuple(quantiles)


def _unusable(text: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "--metrics-config=summary_quantiles expects <quantile>:<error>[,...] with quantiles between 0 and 1, such as "
        f"0.5:0.05,0.99:0.001, got '{text}'"
    )


@dataclass(frozen=True, slots=True)
class SummarySnapshot:
    """`count` and `sum_us` cover all time, `quantiles_us` the last minute; NaN without observations in it."""

    count: int
    sum_us: int
    quantiles_us: tuple[tuple[float, float], ...]


class Summary:
    """Durations, counted by size and age in slices of ten seconds; the oldest slice becomes the newest one again.

    Not thread-safe.
    """

    def __init__(self, quantiles: Sequence[float], now_s: Callable[[], float] = time.monotonic) -> None:
        self._quantiles = tuple(quantiles)
        self._now_s = now_s
        self._slices = np.zeros((_NUM_SLICES, _NUM_STEPS), np.uint32)
        self._slice = int(now_s() / _SLICE_S)
        self._count = 0
        self._sum_ns = 0

    def add_all(self, values_ns: Sequence[int] | Numbers) -> None:
        values = np.asarray(values_ns, np.int64)
        if not values.size:
            return
        self._count += values.size
        self._sum_ns += int(values.sum())
        # Step 0 is below a microsecond.
        steps = np.floor(np.log(np.maximum(values, 1) / _NS_PER_US) / _STEP).astype(np.int64) + 1
        self._turn()
        counts = np.bincount(np.clip(steps, 0, _NUM_STEPS - 1), minlength=_NUM_STEPS)
        self._slices[self._slice % _NUM_SLICES] += counts.astype(np.uint32)

    @property
    def window(self) -> int:
        """The number of the current slice: the quantiles change with it, even if nothing is added."""
        return int(self._now_s() / _SLICE_S)

    def snapshot(self) -> SummarySnapshot:
        self._turn()
        below = np.cumsum(self._slices.sum(axis=0, dtype=np.int64))
        quantiles = tuple((quantile, _value_us(below, quantile)) for quantile in self._quantiles)
        return SummarySnapshot(self._count, self._sum_ns // _NS_PER_US, quantiles)

    def _turn(self) -> None:
        """Drop values that are older than the window."""
        now = self.window
        for index in range(max(self._slice, now - _NUM_SLICES) + 1, now + 1):
            self._slices[index % _NUM_SLICES] = 0
        self._slice = now


def _value_us(below: Numbers, quantile: float) -> float:
    total = int(below[-1])
    if not total:
        return math.nan
    step = int(np.searchsorted(below, math.ceil(quantile * total)))
    return math.exp((step - 0.5) * _STEP) if step else 0.0


class DurationSummaries:
    """A summary for each duration of a request for which Triton has one, with these `quantiles`."""

    def __init__(self, quantiles: Sequence[float]) -> None:
        self.request = Summary(quantiles)
        self.queue = Summary(quantiles)
        self.compute_input = Summary(quantiles)
        self.compute_infer = Summary(quantiles)
        self.compute_output = Summary(quantiles)
        self.cache_hit = Summary(quantiles)
        self.cache_miss = Summary(quantiles)

    @property
    def window(self) -> int:
        """As that of each summary."""
        return self.request.window

    def add_computed(self, durations: Numbers) -> None:
        """Compute input, infer and output of requests, a line for each."""
        self.compute_input.add_all(durations[:, 0])
        self.compute_infer.add_all(durations[:, 1])
        self.compute_output.add_all(durations[:, 2])

    def snapshot(self) -> dict[str, SummarySnapshot]:
        return {name: summary.snapshot() for name, summary in vars(self).items()}
