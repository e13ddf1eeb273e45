"""One measurement window, and when several of them agree. Pure: harvests in, numbers out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from modelserver.bench.fleet import Harvest
from modelserver.bench.server_statistics import ServerCounts

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


# As many windows in a row must agree, and are reported together.
NUM_STABLE = 3
# A request that is sent later than this after it was due counts as delayed.
DELAY_LIMIT_NS = 1_000_000

DUE, START, SENT, FIRST, END = range(5)


@dataclass(frozen=True, slots=True)
class Window:
    """Requests answered from `begin_ns` to `end_ns`. A request belongs to the window in which it ends."""

    begin_ns: int
    end_ns: int
    batch_size: int
    latency: Latency
    num_failed: int
    failures: Counter[str]
    send_us: float
    receive_us: float
    num_delayed: int
    num_responses: int
    # Share of a CPU that the busiest load process used, and CPU of all of them per request.
    busiest: float
    cpu_us: float
    # The server's counts at both ends.
    before: ServerCounts | None = None
    after: ServerCounts | None = None

    @property
    def server(self) -> ServerCounts | None:
        """The server's counts in the window; None for a server without statistics."""
        return self.after - self.before if self.after is not None and self.before is not None else None

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def num_requests(self) -> int:
        return self.latency.count

    @property
    def throughput(self) -> float:
        """Inferences per second: requests times the batch."""
        return self.num_requests * self.batch_size / self.seconds if self.seconds > 0 else 0.0

    @property
    def response_rate(self) -> float:
        """Responses per second, of decoupled models."""
        return self.num_responses / self.seconds if self.seconds > 0 else 0.0


def make_window(
    harvest: Harvest,
    *,
    begin_ns: int,
    end_ns: int,
    batch_size: int,
    extra_percentile: float | None,
    before: ServerCounts | None = None,
    after: ServerCounts | None = None,
) -> Window:
    """The window of the records in `harvest` between two times."""
    ends = harvest.times[:, END]
    is_inside = (ends >= begin_ns) & (ends < end_ns)
    times = harvest.times[is_inside]
    num_failed = int(((harvest.failure_times >= begin_ns) & (harvest.failure_times < end_ns)).sum())
    has_responses = len(harvest.num_responses) == len(harvest.times) > 0
    count = len(times)
    return Window(
        begin_ns=begin_ns,
        end_ns=end_ns,
        batch_size=batch_size,
        latency=summarise(times[:, END] - times[:, DUE], extra=extra_percentile),
        num_failed=num_failed,
        failures=harvest.failures,
        send_us=float((times[:, SENT] - times[:, START]).mean()) / 1000 if count else 0.0,
        receive_us=float((times[:, END] - times[:, FIRST]).mean()) / 1000 if count else 0.0,
        num_delayed=int((times[:, START] - times[:, DUE] > DELAY_LIMIT_NS).sum()),
        num_responses=int(harvest.num_responses[is_inside].sum()) if has_responses else count,
        busiest=harvest.busiest,
        cpu_us=harvest.cpu_s * 1e6 / len(harvest.times) if len(harvest.times) else 0.0,
        before=before,
        after=after,
    )


def merge(harvests: Sequence[Harvest], windows: Sequence[Window], extra_percentile: float | None) -> Window:
    """Windows that follow each other, as one; their harvests likewise."""
    whole = Harvest()
    for harvest in harvests:
        whole.add(harvest)
    merged = make_window(
        whole,
        begin_ns=windows[0].begin_ns,
        end_ns=windows[-1].end_ns,
        batch_size=windows[0].batch_size,
        extra_percentile=extra_percentile,
        before=windows[0].before,
        after=windows[-1].after,
    )
    assert np.isfinite(merged.throughput), "a window has a length"
    return merged


@dataclass(frozen=True, slots=True)
class Stability:
    """When measurements agree: throughput and latency of the last windows within `percentage` of each other.

    `percentile` None means the average latency. `latency_limit_us` 0 means no limit.
    """

    percentage: float = 10.0
    percentile: float | None = None
    latency_limit_us: float = 0.0

    def is_stable(self, windows: Sequence[Window]) -> bool:
        recent = windows[-NUM_STABLE:]
        if len(recent) < NUM_STABLE or any(not window.num_requests for window in recent):
            return False
        throughputs = [window.throughput for window in recent]
        latencies = [window.latency.at(self.percentile) for window in recent]
        return self._agree(throughputs) and self._agree(latencies)

    def _agree(self, values: Sequence[float]) -> bool:
        return min(values) > 0 and max(values) / min(values) <= 1 + self.percentage / 100

    def is_hopeless(self, windows: Sequence[Window]) -> bool:
        """All of the last windows are over the limit: measuring on would not bring them below."""
        recent = windows[-NUM_STABLE:]
        return len(recent) == NUM_STABLE and all(self.is_over_limit(window) for window in recent)

    def is_over_limit(self, window: Window) -> bool:
        return self.latency_limit_us > 0 and window.latency.at(self.percentile) > self.latency_limit_us
