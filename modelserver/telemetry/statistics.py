"""Cumulative numbers of one loaded model version, with Triton's meanings.

Written once per batch by workers, read as a consistent snapshot by the statistics endpoints and the
metrics collector. This module knows no protocols and no metric names.
"""

from __future__ import annotations

import enum
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from modelserver.telemetry.histogram import Histogram, Numbers
from modelserver.telemetry.measurement import ProcessRestarts
from modelserver.telemetry.statistics_snapshot import (
    BatchStat,
    DurationStat,
    FailureReason,
    ResponseStat,
    StatisticsSnapshot,
)
from modelserver.telemetry.summary import DurationSummaries

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000

# Upper bounds of the duration histograms: 100 µs to 60 s.
DURATION_BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
# Steps of 2^(1/4) from 10 µs to about two minutes: a percentile between two of them is within 10 % of the truth.
LATENCY_BOUNDS_S = tuple(1e-5 * 2 ** (step / 4) for step in range(95))
_MAX_NOTED = 1024
_LONE_COLUMNS = 6
_MAX_NOTED_LONE = _MAX_NOTED * _LONE_COLUMNS
# Response positions that are counted separately. A bound is needed because a stream may be endless.
MAX_RESPONSE_POSITIONS = 1024
ROWS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ResponseKind(enum.Enum):
    """The kind of a decoupled model's response."""

    SUCCESS = "success"
    FAIL = "fail"
    EMPTY = "empty_response"  # the final one, without outputs
    CANCEL = "cancel"  # an error because the client had left


@dataclass(slots=True)
class BatchTiming:
    """Durations of the phases of one batch."""

    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int

    @property
    def total_ns(self) -> int:
        return self.compute_input_ns + self.compute_infer_ns + self.compute_output_ns


class _ComputeSums:
    """Sums over executions; all three phases have the same count."""

    __slots__ = ("count", "infer_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.count = 0
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0

    def add(self, count: int, sums_ns: Numbers) -> None:
        """Add `count` batches or requests whose input, infer and output times sum up to `sums_ns`."""
        input_ns, infer_ns, output_ns = sums_ns.tolist()
        self.count += count
        self.input_ns += input_ns
        self.infer_ns += infer_ns
        self.output_ns += output_ns

    def snapshot(self) -> BatchStat:
        return BatchStat(
            DurationStat(self.count, self.input_ns),
            DurationStat(self.count, self.infer_ns),
            DurationStat(self.count, self.output_ns),
        )


class _ResponseSums:
    """Sums over the responses of one position, by kind."""

    __slots__ = ("infer_ns", "num_computed", "num_outputs", "output_ns", "totals")

    def __init__(self) -> None:
        self.num_computed = 0
        self.infer_ns = 0
        self.num_outputs = 0
        self.output_ns = 0
        self.totals = {kind: [0, 0] for kind in ResponseKind}

    def add(self, kind: ResponseKind, infer_ns: int, output_ns: int) -> None:
        self.num_computed += 1
        self.infer_ns += infer_ns
        if kind is not ResponseKind.EMPTY:
            self.num_outputs += 1
            self.output_ns += output_ns
        total = self.totals[kind]
        total[0] += 1
        total[1] += infer_ns + output_ns

    def snapshot(self) -> ResponseStat:
        return ResponseStat(
            DurationStat(self.num_computed, self.infer_ns),
            DurationStat(self.num_outputs, self.output_ns),
            *(DurationStat(*self.totals[kind]) for kind in ResponseKind),
        )


def _zero() -> int:
    return 0


class ModelStatistics:
    """Recording may come from any thread; `_lock` guards every number.

    `pending` and `inflight` are called at each snapshot. The first response of a model that is not decoupled is its
    only one; that of a decoupled model is recorded separately. Without `summary_quantiles` there are no summaries.
    """

    def __init__(
        self,
        *,
        pending: Callable[[], int] = _zero,
        inflight: Callable[[], int] = _zero,
        first_response_bounds_ms: Sequence[float] = (),
        is_decoupled: bool = False,
        summary_quantiles: Sequence[float] = (),
    ) -> None:
        # Set once a request of this model was traced; only then do workers look for traced requests.
        self.is_traced = False
        # An ensemble depends on its models.
        self.is_decoupled = is_decoupled
        # How long the slowest instance was warmed up, in seconds.
        self.warmup_s = 0.0
        # Of the processes that instances live in.
        self.process_restarts = ProcessRestarts()
        self.pending = pending
        self.inflight = inflight
        self._lock = threading.Lock()
        # Batches not yet part of the sums; appended without the lock, from any thread.
        self._noted: deque[tuple[int, int, BatchTiming, Sequence[int], Sequence[int]]] = deque()
        # Batches of one request, as numbers one behind the other, because a list of rows takes three times as long to
        # read: rows, compute input, infer and output, queue, request.
        self._noted_lone: list[int] = []
        # Requests that were answered later: compute input, infer and output, queue, request.
        self._noted_ended: deque[tuple[int, int, int, int, int]] = deque()
        # Responses of decoupled models: position, kind, compute infer, compute output.
        self._noted_responses: deque[tuple[int, ResponseKind, int, int]] = deque()
        self._responses: dict[int, _ResponseSums] = {}
        self._last_ns = 0
        # Equal numbers share a counter: successes have a queue time, and compute times unless cached.
        self._num_successes = 0
        self._request_ns = 0
        self._queue_ns = 0
        self._computed = _ComputeSums()
        self._num_cache_hits = 0
        self._cache_hit_ns = 0
        self._num_cache_misses = 0
        self._cache_miss_ns = 0
        self._num_failures = 0
        self._failed_ns = 0
        self._inference_count = 0
        self._execution_count = 0
        self._last_inference_ms = 0
        self._batches: dict[int, _ComputeSums] = {}
        self._failures = dict.fromkeys(FailureReason, 0)
        self._request_histogram = Histogram(DURATION_BOUNDS_S, _NS_PER_S)
        self._queue_histogram = Histogram(DURATION_BOUNDS_S, _NS_PER_S)
        self._compute_infer_histogram = Histogram(DURATION_BOUNDS_S, _NS_PER_S)
        self._batch_rows_histogram = Histogram(ROWS_BOUNDS)
        self._first_response_histogram = Histogram(first_response_bounds_ms, _NS_PER_MS)
        self._latency_histogram = Histogram(LATENCY_BOUNDS_S, _NS_PER_S)
        self._summaries = DurationSummaries(summary_quantiles) if summary_quantiles else None
        self._at_reset: StatisticsSnapshot | None = None
        self._revision = 0  # grows with every change of the sums

    def record_batch(
        self, rows: int, timing: BatchTiming, *, queue_ns: Sequence[int], request_ns: Sequence[int]
    ) -> None:
        """One executed batch of `rows` rows. `queue_ns` and `request_ns` are of its successful requests only.

        Only notes the batch, which costs a fraction of a microsecond; many notes are summed up at once.
        """
        self._noted.append((time.time_ns(), rows, timing, queue_ns, request_ns))
        if len(self._noted) >= _MAX_NOTED:
            with self._lock:
                self._fold()

    def record_lone(
        self, rows: int, input_ns: int, infer_ns: int, output_ns: int, queue_ns: int, request_ns: int
    ) -> None:
        """As `record_batch`, for a batch of one successful request: a row of numbers instead of an object."""
        self._last_ns = time.time_ns()
        noted = self._noted_lone
        noted += (rows, input_ns, infer_ns, output_ns, queue_ns, request_ns)
        if len(noted) >= _MAX_NOTED_LONE:
            with self._lock:
                self._fold()

    def record_failed_execution(self) -> None:
        """Record a batch that failed as a whole: an execution without a time, whose requests are not inferences."""
        with self._lock:
            self._revision += 1
            self._execution_count += 1

    def record_padding(self, rows: int) -> None:
        """Rows of a recorded batch that belong to no request: `batch_stats` has them, `inference_count` has not."""
        with self._lock:
            self._revision += 1
            self._inference_count -= rows

    def _fold(self) -> None:
        """Add the noted batches to the sums. Called with the lock held."""
        if not (self._noted_lone or self._noted or self._noted_ended or self._noted_responses):
            return
        self._revision += 1
        self._fold_lone()
        self._fold_batches()
        self._fold_ended()
        for _ in range(len(self._noted_responses)):
            position, kind, infer_ns, output_ns = self._noted_responses.popleft()
            sums = self._responses.get(position)
            if sums is None:
                sums = self._responses[position] = _ResponseSums()
            sums.add(kind, infer_ns, output_ns)

    def _fold_lone(self) -> None:
        noted = self._noted_lone
        count = len(noted)
        if not count:
            return
        self._last_inference_ms = max(self._last_inference_ms, self._last_ns // 1_000_000)
        # Rows that other threads note meanwhile stay.
        table = np.frombuffer(array("q", noted[:count]), np.int64).reshape(-1, _LONE_COLUMNS)
        del noted[:count]
        rows, durations = table[:, 0], table[:, 1:4]
        self._add_executions(rows, durations)
        self._add_successes(durations, table[:, 4], table[:, 5])

    def _fold_ended(self) -> None:
        noted = [self._noted_ended.popleft() for _ in range(len(self._noted_ended))]
        if noted:
            table = np.array(noted, np.int64)
            self._add_successes(table[:, 0:3], table[:, 3], table[:, 4])

    def _add_successes(self, durations: Numbers, queue_ns: Numbers, request_ns: Numbers) -> None:
        """Add requests with separate times, one row of `durations` each."""
        self._num_successes += len(durations)
        self._computed.add(len(durations), durations.sum(axis=0))
        self._compute_infer_histogram.add_all(durations[:, 1])
        self._queue_ns += self._queue_histogram.add_all(queue_ns)
        if self._summaries is not None:
            self._summaries.add_computed(durations)
            self._summaries.queue.add_all(queue_ns)
        self._add_requests(request_ns)

    def _add_requests(self, request_ns: Sequence[int] | Numbers) -> None:
        """Add the durations of successful requests."""
        self._request_ns += self._request_histogram.add_all(request_ns)
        self._latency_histogram.add_all(request_ns)
        if not self.is_decoupled:
            self._first_response_histogram.add_all(request_ns)
        if self._summaries is not None:
            self._summaries.request.add_all(request_ns)

    def _add_executions(self, all_rows: Numbers, durations: Numbers) -> None:
        """Add the per-batch counts, regardless of the requests."""
        self._execution_count += len(all_rows)
        self._inference_count += int(all_rows.sum())
        for rows in np.unique(all_rows).tolist():
            of_rows = durations[all_rows == rows]
            self._batches.setdefault(rows, _ComputeSums()).add(len(of_rows), of_rows.sum(axis=0))
        self._batch_rows_histogram.add_all(all_rows)

    def _fold_batches(self) -> None:
        noted = [self._noted.popleft() for _ in range(len(self._noted))]
        if not noted:
            return
        self._last_inference_ms = max(self._last_inference_ms, noted[-1][0] // 1_000_000)
        # A line per batch: rows, compute input, infer and output in ns, successful requests.
        table = np.array(
            [
                (rows, timing.compute_input_ns, timing.compute_infer_ns, timing.compute_output_ns, len(request_ns))
                for _, rows, timing, _, request_ns in noted
            ],
            np.int64,
        )
        all_rows, durations, num_successes = table[:, 0], table[:, 1:4], table[:, 4]
        self._add_executions(all_rows, durations)
        self._num_successes += int(num_successes.sum())
        self._computed.add(int(num_successes.sum()), num_successes @ durations)
        of_requests = np.repeat(durations, num_successes, axis=0)
        self._compute_infer_histogram.add_all(of_requests[:, 1])
        queue_ns = [value for *_, values, _ in noted for value in values]
        self._queue_ns += self._queue_histogram.add_all(queue_ns)
        if self._summaries is not None:
            self._summaries.add_computed(of_requests)
            self._summaries.queue.add_all(queue_ns)
        self._add_requests([value for *_, values in noted for value in values])

    def record_failures(self, reason: FailureReason, request_ns: Sequence[int]) -> None:
        """Requests that ended in an error, by how long they lived."""
        with self._lock:
            self._revision += 1
            self._num_failures += len(request_ns)
            self._failed_ns += sum(request_ns)
            self._failures[reason] += len(request_ns)

    def record_ended(self, input_ns: int, infer_ns: int, output_ns: int, queue_ns: int, request_ns: int) -> None:
        """A request that was answered later than its batch was executed has succeeded.

        The batch itself is recorded by `record_batch`, without this request's times.
        """
        self._noted_ended.append((input_ns, infer_ns, output_ns, queue_ns, request_ns))
        if len(self._noted_ended) >= _MAX_NOTED:
            with self._lock:
                self._fold()

    def record_response(self, position: int, kind: ResponseKind, infer_ns: int, output_ns: int) -> None:
        """One response of a decoupled model, the `position`-th of its request from 0."""
        self._noted_responses.append((min(position, MAX_RESPONSE_POSITIONS - 1), kind, infer_ns, output_ns))
        if len(self._noted_responses) >= _MAX_NOTED:
            with self._lock:
                self._fold()

    def record_first_response(self, since_arrival_ns: int) -> None:
        """The first response of a request to a decoupled model, unless it is an error."""
        with self._lock:
            self._revision += 1
            self._first_response_histogram.add_all((since_arrival_ns,))

    def record_cache_hit(self, request_ns: int, lookup_ns: int) -> None:
        """A request that was answered from the response cache: a success that neither queued nor executed."""
        with self._lock:
            self._revision += 1
            self._num_successes += 1
            self._num_cache_hits += 1
            self._cache_hit_ns += lookup_ns
            self._add_requests((request_ns,))
            self._queue_histogram.add_all((0,))
            if self._summaries is not None:
                self._summaries.queue.add_all((0,))
                self._summaries.cache_hit.add_all((lookup_ns,))

    def record_cache_miss(self, miss_ns: int) -> None:
        """Time spent on a cache look-up that found nothing, and on the insertion after it."""
        with self._lock:
            self._revision += 1
            self._num_cache_misses += 1
            self._cache_miss_ns += miss_ns
            if self._summaries is not None:
                self._summaries.cache_miss.add_all((miss_ns,))

    def reset(self) -> None:
        """Restart `since_reset`. `snapshot` continues: metric counters never fall while a version serves."""
        self._at_reset = self.snapshot()

    def since_reset(self) -> StatisticsSnapshot:
        """As `snapshot`, but only since the last reset."""
        now, before = self.snapshot(), self._at_reset
        return now if before is None else now.since(before)

    def mark(self) -> tuple[object, ...]:
        """A mark that stays equal as long as the version's metrics do; cheaper than a snapshot."""
        # Without the lock, if nothing is to fold: a change counts its revision first, and `snapshot` waits for its end.
        if self._noted_lone or self._noted or self._noted_ended or self._noted_responses:
            with self._lock:
                self._fold()
        revision = self._revision
        window = 0 if self._summaries is None else self._summaries.window
        return revision, self.pending(), self.inflight(), self.warmup_s, window, self.process_restarts.revision

    def snapshot(self) -> StatisticsSnapshot:
        """All numbers as they were at one moment, copied. Cheap enough for every scrape."""
        with self._lock:
            self._fold()
            computed = self._computed.snapshot()
            return StatisticsSnapshot(
                success=DurationStat(self._num_successes, self._request_ns),
                fail=DurationStat(self._num_failures, self._failed_ns),
                queue=DurationStat(self._num_successes, self._queue_ns),
                compute_input=computed.compute_input,
                compute_infer=computed.compute_infer,
                compute_output=computed.compute_output,
                cache_hit=DurationStat(self._num_cache_hits, self._cache_hit_ns),
                cache_miss=DurationStat(self._num_cache_misses, self._cache_miss_ns),
                inference_count=self._inference_count,
                execution_count=self._execution_count,
                last_inference_ms=self._last_inference_ms,
                batch_stats={rows: sums.snapshot() for rows, sums in sorted(self._batches.items())},
                response_stats={position: sums.snapshot() for position, sums in sorted(self._responses.items())},
                failures=dict(self._failures),
                pending=self.pending(),
                inflight=self.inflight(),
                request_histogram=self._request_histogram.snapshot(),
                queue_histogram=self._queue_histogram.snapshot(),
                compute_infer_histogram=self._compute_infer_histogram.snapshot(),
                batch_rows_histogram=self._batch_rows_histogram.snapshot(),
                first_response_histogram=self._first_response_histogram.snapshot(),
                latency_histogram=self._latency_histogram.snapshot(),
                warmup_s=self.warmup_s,
                summaries={} if self._summaries is None else self._summaries.snapshot(),
            )
