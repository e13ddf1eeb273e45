"""Windows: which requests belong to one, and when several agree."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from modelserver.bench.fleet import Harvest
from modelserver.bench.server_statistics import ModelCounts, ServerCounts
from modelserver.bench.window import Stability, Window, make_window, merge
from modelserver.telemetry.statistics_snapshot import DurationStat

MS = 1_000_000


def harvest(*rows: tuple[int, int, int, int, int], failure_times: tuple[int, ...] = ()) -> Harvest:
    """Rows of due, start, sent, first, end, in milliseconds."""
    return Harvest(
        times=np.array(rows, dtype=np.int64).reshape(-1, 5) * MS,
        failure_times=np.array(failure_times, dtype=np.int64) * MS,
        failures=Counter({"bad": len(failure_times)}) if failure_times else Counter(),
    )


def window(records: Harvest, begin: int, end: int, **more: object) -> Window:
    return make_window(
        records,
        begin_ns=begin * MS,
        end_ns=end * MS,
        batch_size=2,
        extra_percentile=None,
        **more,  # type: ignore[arg-type]
    )


def test_a_request_belongs_to_the_window_in_which_it_ends() -> None:
    records = harvest((0, 0, 0, 9, 10), (5, 5, 5, 19, 20), (8, 8, 8, 29, 30), failure_times=(9, 15, 30))
    found = window(records, 10, 30)
    assert found.num_requests == 2
    assert found.latency.mean_us == 12_500
    assert found.num_failed == 1
    assert found.throughput == pytest.approx(2 * 2 / 0.02)


def test_latency_begins_when_a_request_was_due() -> None:
    """No coordinated omission: waiting for a free connection is the server's doing."""
    found = window(harvest((0, 40, 41, 49, 50), (40, 40, 40, 49, 50)), 0, 100)
    assert found.latency.max_us == 50_000
    assert found.num_delayed == 1
    assert found.send_us == 500
    assert found.receive_us == 1000


def test_responses_of_a_stream_are_counted_by_window() -> None:
    records = harvest((0, 0, 0, 1, 10), (0, 0, 0, 1, 40))
    records.num_responses = np.array([3, 5])
    found = window(records, 0, 20)
    assert (found.num_requests, found.num_responses) == (1, 3)
    assert found.response_rate == pytest.approx(3 / 0.02)


def test_an_empty_window_is_no_error() -> None:
    found = window(Harvest(), 0, 10)
    assert (found.num_requests, found.throughput, found.latency.mean_us) == (0, 0.0, 0.0)


def counts(number: int) -> ServerCounts:
    return ServerCounts(ModelCounts("m", "1", number, number, DurationStat(number, number * 5000)))


def test_merged_windows_are_one_from_the_first_begin_to_the_last_end() -> None:
    first, second = harvest((0, 0, 0, 5, 5)), harvest((0, 0, 0, 15, 15), (0, 0, 0, 25, 25))
    windows = [
        window(first, 0, 10, before=counts(10), after=counts(11)),
        window(second, 12, 30, before=counts(12), after=counts(20)),
    ]
    merged = merge([first, second], windows, None)
    assert merged.num_requests == 3
    assert merged.seconds == pytest.approx(0.03)
    assert merged.server is not None
    assert merged.server.model.inference_count == 10
    assert merged.server.model.mean_us("success") == 5


def of(throughput: int, latency_ms: int) -> Window:
    """A window of one second with so many requests."""
    return window(harvest(*[(0, 0, 0, latency_ms, latency_ms)] * throughput), 0, 1000)


@pytest.mark.parametrize(
    ("measured", "is_stable"),
    [
        ([(100, 10)], False),
        ([(100, 10), (100, 10)], False),
        ([(100, 10), (105, 10), (110, 11)], True),
        ([(100, 10), (105, 10), (112, 10)], False),
        ([(100, 10), (100, 10), (100, 12)], False),
        ([(10, 50), (100, 10), (100, 10), (100, 10)], True),
        ([(100, 10), (100, 10), (0, 10)], False),
    ],
)
def test_the_last_three_windows_must_agree(measured: list[tuple[int, int]], is_stable: bool) -> None:
    assert Stability(percentage=10).is_stable([of(*one) for one in measured]) is is_stable


def test_a_percentile_may_judge_in_place_of_the_average() -> None:
    steady = [(0, 0, 0, 10, 10)] * 98
    windows = [window(harvest(*steady, (0, 0, 0, 10, slow), (0, 0, 0, 10, slow)), 0, 1000) for slow in (11, 40, 90)]
    assert Stability(percentage=20, percentile=50).is_stable(windows)
    assert not Stability(percentage=20, percentile=99).is_stable(windows)


def test_measuring_ends_when_three_windows_are_over_the_limit() -> None:
    stability = Stability(latency_limit_us=15_000)
    windows = [of(10, 20), of(10, 20), of(10, 20)]
    assert not stability.is_hopeless(windows[:2])
    assert stability.is_hopeless(windows)
    assert not stability.is_hopeless([*windows, of(10, 10)])
    assert not Stability().is_hopeless(windows)
