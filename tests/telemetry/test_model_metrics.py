"""Metrics that models make: shared by name and labels, gone with their last holder."""

from __future__ import annotations

from typing import Any

import pytest

from modelserver.errors import ErrorCode, ServerError
from modelserver.telemetry.model_metrics import ModelMetricsBoard
from tests.support.metrics_pages import render_openmetrics, render_text

ONE, TWO = object(), object()


def make(
    board: ModelMetricsBoard, owner: object, kind: str = "counter", name: str = "calls", **more: Any
) -> tuple[int, int]:
    family = board.ask(owner, "metric_family", {"name": name, "description": "Calls", "kind": kind})
    arguments = {"family": family, "labels": {"model": "m"}, "buckets": (), **more}
    return family, board.ask(owner, "metric_new", arguments)


def samples(board: ModelMetricsBoard) -> dict[str, float]:
    return {
        f"{sample.name}{''.join(f',{key}={value}' for key, value in sample.labels.items())}": sample.value
        for family in board.families()
        for sample in family.samples
    }


def test_two_owners_share_a_number_which_goes_with_the_last() -> None:
    board = ModelMetricsBoard()
    family, metric = make(board, ONE)
    _, other = make(board, TWO)
    board.ask(ONE, "metric_add", {"handle": metric, "value": 2.0})
    board.ask(TWO, "metric_add", {"handle": other, "value": 0.5})
    assert board.ask(ONE, "metric_value", {"handle": metric}) == 2.5
    assert samples(board) == {"calls,model=m": 2.5}
    board.forget(TWO)
    assert samples(board) == {"calls,model=m": 2.5}
    board.ask(ONE, "metric_drop", {"handle": metric})
    board.ask(ONE, "metric_drop", {"handle": metric})
    assert samples(board) == {}
    board.ask(ONE, "metric_drop", {"handle": family})
    assert board.families() == []


def test_a_gauge_is_set() -> None:
    board = ModelMetricsBoard()
    _, metric = make(board, ONE, "gauge")
    board.ask(ONE, "metric_set", {"handle": metric, "value": -3.0})
    board.ask(ONE, "metric_add", {"handle": metric, "value": 1.0})
    assert samples(board) == {"calls,model=m": -2.0}


def test_a_histogram_counts_up_to_its_bounds() -> None:
    board = ModelMetricsBoard()
    _, metric = make(board, ONE, "histogram", buckets=(1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        board.ask(ONE, "metric_observe", {"handle": metric, "value": value})
    assert samples(board) == {
        "calls_bucket,model=m,le=1.0": 2,
        "calls_bucket,model=m,le=2.0": 3,
        "calls_bucket,model=m,le=+Inf": 4,
        "calls_count,model=m": 4,
        "calls_sum,model=m": 12.0,
    }


def test_the_bounds_of_buckets_are_written_as_triton_writes_them() -> None:
    board = ModelMetricsBoard()
    make(board, ONE, "histogram", buckets=(0.1, 1.0, 2.5, 10.0))
    families = board.families()
    lines = [line for line in render_text(families).decode().splitlines() if "_bucket" in line]
    assert lines == [f'calls_bucket{{model="m",le="{bound}"}} 0' for bound in ("0.1", "1", "2.5", "10", "+Inf")]
    assert 'le="10.0"' in render_openmetrics(families).decode()  # which demands it


@pytest.mark.parametrize(
    ("details", "code", "message"),
    [
        ({"kind": "gauge"}, ErrorCode.ALREADY_EXISTS, "there already as a counter"),
        ({"kind": "sum"}, ErrorCode.INVALID_ARGUMENT, "expected one of counter, gauge, histogram"),
        ({"name": "no name"}, ErrorCode.INVALID_ARGUMENT, "'no name' is not a valid metric name"),
        ({"labels": {"le": "1"}}, ErrorCode.INVALID_ARGUMENT, "'le' is not a valid label name"),
        ({"name": "h", "kind": "histogram", "buckets": (2.0, 1.0)}, ErrorCode.INVALID_ARGUMENT, "must ascend"),
        ({"family": 99}, ErrorCode.NOT_FOUND, "MetricFamily of this metric is gone"),
    ],
)
def test_what_cannot_be_says_why(details: dict[str, Any], code: ErrorCode, message: str) -> None:
    board = ModelMetricsBoard()
    make(board, ONE)
    with pytest.raises(ServerError, match=message) as refused:
        make(board, TWO, **details)
    assert refused.value.code is code


def test_another_owners_handle_is_worth_nothing() -> None:
    board = ModelMetricsBoard()
    _, metric = make(board, ONE)
    with pytest.raises(ServerError, match="was dropped"):
        board.ask(TWO, "metric_add", {"handle": metric, "value": 1.0})
