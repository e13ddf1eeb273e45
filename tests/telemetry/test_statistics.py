from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from modelserver.telemetry.statistics import DURATION_BOUNDS_S, BatchTiming, ModelStatistics, ResponseKind
from modelserver.telemetry.statistics_snapshot import DurationStat, FailureReason

MS = 1_000_000
TIMING = BatchTiming(1 * MS, 20 * MS, 3 * MS)


def test_a_batch_counts_per_request_and_per_batch() -> None:
    statistics = ModelStatistics()
    before_ms = time.time_ns() // MS
    statistics.record_batch(5, TIMING, queue_ns=[2 * MS, 4 * MS], request_ns=[26 * MS, 28 * MS])
    numbers = statistics.snapshot()
    assert numbers.success == DurationStat(2, 54 * MS)
    assert numbers.queue == DurationStat(2, 6 * MS)
    assert numbers.compute_input == DurationStat(2, 2 * MS)
    assert numbers.compute_infer == DurationStat(2, 40 * MS)
    assert numbers.compute_output == DurationStat(2, 6 * MS)
    assert (numbers.inference_count, numbers.execution_count) == (5, 1)
    assert numbers.batch_stats.keys() == {5}
    assert numbers.batch_stats[5].compute_infer == DurationStat(1, 20 * MS)
    assert before_ms <= numbers.last_inference_ms <= time.time_ns() // MS


def test_a_lone_request_counts_as_a_batch_of_one() -> None:
    one, other = ModelStatistics(), ModelStatistics()
    before_ms = time.time_ns() // MS
    for rows, queue_ns, request_ns in ((5, 2 * MS, 26 * MS), (1, 0, 24 * MS), (5, MS, 10**11)):
        timing = BatchTiming(rows * MS, 20 * MS, 3 * MS)
        one.record_lone(rows, rows * MS, 20 * MS, 3 * MS, queue_ns, request_ns)
        other.record_batch(rows, timing, queue_ns=[queue_ns], request_ns=[request_ns])
        numbers = one.snapshot()
        assert before_ms <= numbers.last_inference_ms <= time.time_ns() // MS
        assert replace(numbers, last_inference_ms=0) == replace(other.snapshot(), last_inference_ms=0)


def test_many_are_summed_up_when_nobody_asks() -> None:
    statistics = ModelStatistics()
    for _ in range(5000):
        statistics.record_lone(1, 1, 2, 3, 4, 5)
        statistics.record_batch(2, TIMING, queue_ns=[1, 1], request_ns=[2, 2])
    assert max(len(statistics._noted), len(statistics._noted_lone) // 6) < 1024
    numbers = statistics.snapshot()
    assert (numbers.execution_count, numbers.inference_count, numbers.success.count) == (10_000, 15_000, 15_000)
    assert numbers.batch_stats[1].compute_infer == DurationStat(5000, 10_000)


def test_failures_by_reason() -> None:
    statistics = ModelStatistics()
    statistics.record_failures(FailureReason.REJECTED, [1, 2])
    statistics.record_failures(FailureReason.CANCELED, [3])
    numbers = statistics.snapshot()
    assert numbers.fail == DurationStat(3, 6)
    assert numbers.failures == {
        FailureReason.REJECTED: 2, FailureReason.CANCELED: 1, FailureReason.BACKEND: 0, FailureReason.OTHER: 0,
    }  # fmt: skip
    assert numbers.success.count == numbers.execution_count == 0


def test_a_cache_hit_is_a_success_without_compute() -> None:
    statistics = ModelStatistics()
    statistics.record_batch(1, TIMING, queue_ns=[1], request_ns=[2])
    statistics.record_cache_hit(request_ns=10, lookup_ns=4)
    statistics.record_cache_miss(7)
    numbers = statistics.snapshot()
    assert numbers.queue.count == numbers.success.count == 2
    assert numbers.compute_infer.count == numbers.success.count - numbers.cache_hit.count == 1
    assert numbers.cache_hit == DurationStat(1, 4)
    assert numbers.cache_miss == DurationStat(1, 7)


@pytest.mark.parametrize(
    ("duration_ns", "bucket"), [(0, 0), (100_000, 0), (100_001, 1), (60_000 * MS, 17), (10**12, 18)]
)
def test_histogram_bounds_are_inclusive(duration_ns: int, bucket: int) -> None:
    statistics = ModelStatistics()
    statistics.record_batch(1, TIMING, queue_ns=[0], request_ns=[duration_ns])
    histogram = statistics.snapshot().request_histogram
    assert histogram.bounds == DURATION_BOUNDS_S
    assert [index for index, count in enumerate(histogram.counts) if count] == [bucket]
    assert histogram.sum == pytest.approx(duration_ns / 1e9)
    assert histogram.count == 1


def test_histograms_count_what_they_are_named_for() -> None:
    statistics = ModelStatistics()
    statistics.record_batch(3, TIMING, queue_ns=[1, 2], request_ns=[3, 4])
    numbers = statistics.snapshot()
    assert (
        numbers.compute_infer_histogram.count == numbers.queue_histogram.count == numbers.request_histogram.count == 2
    )
    assert numbers.compute_infer_histogram.sum == pytest.approx(0.04)
    assert numbers.batch_rows_histogram.counts[:4] == (0, 0, 1, 0)
    assert numbers.batch_rows_histogram.sum == 3


def test_a_snapshot_does_not_change_any_more() -> None:
    statistics = ModelStatistics()
    statistics.record_batch(1, TIMING, queue_ns=[1], request_ns=[2])
    numbers = statistics.snapshot()
    statistics.record_batch(1, TIMING, queue_ns=[1], request_ns=[2])
    assert numbers.success.count == numbers.batch_stats[1].compute_infer.count == 1


def test_gauges_are_asked_at_each_snapshot() -> None:
    statistics = ModelStatistics(pending=iter([1, 2]).__next__, inflight=iter([3, 4]).__next__)
    assert [(each.pending, each.inflight) for each in (statistics.snapshot(), statistics.snapshot())] == [
        (1, 3),
        (2, 4),
    ]


@pytest.mark.stress
def test_snapshots_are_consistent_while_threads_record() -> None:
    statistics = ModelStatistics()
    stop = threading.Event()

    def record() -> None:
        while not stop.is_set():
            statistics.record_batch(4, TIMING, queue_ns=[1, 2, 3], request_ns=[4, 5, 6])
            statistics.record_lone(1, 1, 2, 3, 4, 5)
            statistics.record_failures(FailureReason.BACKEND, [7])

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            numbers = statistics.snapshot()
            fours, ones = (
                stat.compute_infer.count if (stat := numbers.batch_stats.get(rows)) else 0 for rows in (4, 1)
            )
            num_requests = 3 * fours + ones
            assert numbers.success == DurationStat(num_requests, 15 * fours + 5 * ones)
            assert numbers.queue == DurationStat(num_requests, 6 * fours + 4 * ones)
            assert numbers.compute_infer.count == numbers.request_histogram.count == num_requests
            assert numbers.inference_count == 4 * fours + ones
            assert numbers.execution_count == numbers.batch_rows_histogram.count == fours + ones
            assert numbers.fail.count == numbers.failures[FailureReason.BACKEND]
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_percentiles_are_near_the_truth() -> None:
    statistics = ModelStatistics()
    generator = np.random.default_rng(0)
    latencies = (generator.lognormal(mean=1.0, sigma=1.5, size=5000) * MS).astype(np.int64)
    for chunk in np.split(latencies, 50):
        statistics.record_batch(1, TIMING, queue_ns=[0] * len(chunk), request_ns=chunk.tolist())
    histogram = statistics.snapshot().latency_histogram
    for share in (0.5, 0.9, 0.99):
        truth = float(np.quantile(latencies, share)) / 1e9
        assert abs(histogram.quantile(share) - truth) < 0.1 * truth
    assert ModelStatistics().snapshot().latency_histogram.quantile(0.99) == 0


def test_what_lies_above_every_bound_is_told_as_the_last_bound() -> None:
    statistics = ModelStatistics()
    statistics.record_lone(1, 0, 0, 0, 0, 10**13)
    histogram = statistics.snapshot().latency_histogram
    assert histogram.quantile(0.5) == histogram.bounds[-1]


def test_a_reset_hides_what_came_before_and_loses_nothing() -> None:
    statistics = ModelStatistics()
    statistics.record_batch(5, TIMING, queue_ns=[1, 1], request_ns=[2, 2])
    statistics.record_response(0, ResponseKind.SUCCESS, 3, 4)
    statistics.record_failures(FailureReason.OTHER, [1])
    statistics.reset()
    empty = statistics.since_reset()
    assert (empty.success, empty.fail, empty.inference_count) == (DurationStat(), DurationStat(), 0)
    assert (empty.batch_stats, empty.response_stats) == ({}, {})
    assert empty.request_histogram.count == empty.latency_histogram.count == 0
    statistics.record_batch(5, TIMING, queue_ns=[1], request_ns=[7])
    statistics.record_response(1, ResponseKind.FAIL, 3, 4)
    gained = statistics.since_reset()
    assert (gained.success, gained.queue) == (DurationStat(1, 7), DurationStat(1, 1))
    assert gained.batch_stats[5].compute_infer == DurationStat(1, 20 * MS)
    assert (list(gained.response_stats), gained.response_stats[1].fail) == ([1], DurationStat(1, 7))
    assert gained.failures[FailureReason.OTHER] == 0
    assert statistics.snapshot().success == DurationStat(3, 11)
