"""The numbers of one loaded model version at one moment, with Triton's meanings."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from modelserver.telemetry.histogram import HistogramSnapshot
from modelserver.telemetry.summary import SummarySnapshot


class FailureReason(enum.Enum):
    """Why a request failed; the values are the `reason` labels of Triton's failure metric."""

    REJECTED = "REJECTED"  # by a queue policy: queue full, queue timeout, deadline
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass(frozen=True, slots=True)
class DurationStat:
    """A count, and a total duration."""

    count: int = 0
    ns: int = 0

    def since(self, before: DurationStat) -> DurationStat:
        """The difference to `before`."""
        return DurationStat(self.count - before.count, self.ns - before.ns)


@dataclass(frozen=True, slots=True)
class BatchStat:
    """Numbers of the batches of one size, counted per batch."""

    compute_input: DurationStat = DurationStat()
    compute_infer: DurationStat = DurationStat()
    compute_output: DurationStat = DurationStat()


@dataclass(frozen=True, slots=True)
class ResponseStat:
    """Numbers of the n-th responses of requests to a decoupled model.

    A response begins where the one before ended; `compute_infer` is the time until it was sent.
    """

    compute_infer: DurationStat = DurationStat()
    compute_output: DurationStat = DurationStat()
    success: DurationStat = DurationStat()
    fail: DurationStat = DurationStat()
    empty_response: DurationStat = DurationStat()
    cancel: DurationStat = DurationStat()


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """All numbers at one moment, since the version was loaded.

    Per request: `queue.count` equals `success.count`, and the compute counts equal `success.count` less
    `cache_hit.count`. `inference_count` is executed rows, `execution_count` executed batches;
    `batch_stats` is keyed by rows, `response_stats` by a response's position among those of its request, from 0; the
    last position holds all later ones too. `pending` requests are queued, `inflight` ones queued or executing.
    The histograms are in seconds (`batch_rows_histogram`: rows) and count successes. `first_response_histogram`, in
    milliseconds, is from the arrival of a request to its first response, unless that is an error. `latency_histogram`
    is the request histogram in finer steps, for percentiles. `summaries` are by the name of the duration.
    """

    success: DurationStat
    fail: DurationStat
    queue: DurationStat
    compute_input: DurationStat
    compute_infer: DurationStat
    compute_output: DurationStat
    cache_hit: DurationStat
    cache_miss: DurationStat
    inference_count: int
    execution_count: int
    last_inference_ms: int
    batch_stats: Mapping[int, BatchStat]
    response_stats: Mapping[int, ResponseStat]
    failures: Mapping[FailureReason, int]
    pending: int
    inflight: int
    request_histogram: HistogramSnapshot
    queue_histogram: HistogramSnapshot
    compute_infer_histogram: HistogramSnapshot
    batch_rows_histogram: HistogramSnapshot
    first_response_histogram: HistogramSnapshot
    latency_histogram: HistogramSnapshot
    warmup_s: float = 0.0
    summaries: Mapping[str, SummarySnapshot] = field(default_factory=dict)

    def since(self, before: StatisticsSnapshot) -> StatisticsSnapshot:
        """The difference to `before`, an older snapshot of the same version; gauges and times are the current ones."""
        changes: dict[str, Any] = {}
        for each in fields(self):
            now, then = getattr(self, each.name), getattr(before, each.name)
            if isinstance(now, DurationStat | HistogramSnapshot):
                changes[each.name] = now.since(then)
            elif each.name in _COUNTERS:
                changes[each.name] = now - then
        return replace(
            self,
            **changes,
            batch_stats=_table_since(self.batch_stats, before.batch_stats),
            response_stats=_table_since(self.response_stats, before.response_stats),
            failures={reason: count - before.failures[reason] for reason, count in self.failures.items()},
        )


_COUNTERS = frozenset({"inference_count", "execution_count"})
_Stat = TypeVar("_Stat", BatchStat, ResponseStat)


def _table_since(now: Mapping[int, _Stat], before: Mapping[int, _Stat]) -> dict[int, _Stat]:
    """The rows that have changed since `before`."""
    changed = {}
    for key, stat in now.items():
        old = before.get(key)
        if old == stat:
            continue
        kind = type(stat)
        then = kind() if old is None else old
        changed[key] = kind(*(getattr(stat, each.name).since(getattr(then, each.name)) for each in fields(stat)))
    return changed
