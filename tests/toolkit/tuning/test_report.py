"""What a run of tuning tells of its trials: who is best and why, and the model before and after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelserver.config.pbtxt import parse_pbtxt
from modelserver.toolkit.comparison import Difference, Parity
from modelserver.toolkit.tuning.report import (
    COLUMNS,
    above_best,
    before_after_rows,
    html_report,
    notes,
    rank_rows,
    tune_document,
)
from modelserver.toolkit.tuning.session import TuneOptions, TuneResult
from modelserver.toolkit.tuning.space import Candidate, SpaceOptions, make_space
from modelserver.toolkit.tuning.trial import TunePoint, judge

CONFIG = parse_pbtxt(
    'name: "m" backend: "onnxruntime" max_batch_size: 8 dynamic_batching { } instance_group { count: 1 kind: KIND_CPU }'
).config
WHY = "a setting must be 5% better to replace another"


def result(*throughputs: float, percentile: float | None = 99.0) -> TuneResult:
    """The model as it was, and then with two instances, three, ...: each at one and at four in flight."""
    options = TuneOptions("m", "localhost:1", percentile=percentile)
    made = TuneResult(options, CONFIG, make_space(CONFIG, SpaceOptions(), 4), num_bytes=1000)
    for count, throughput in enumerate(throughputs, 1):
        points = [
            TunePoint(inflight, throughput * inflight / 4, 4e6 / throughput, 2e6 / throughput, 4e6 / throughput)
            for inflight in (1, 4)
        ]
        made.trials.append(judge(Candidate(count, 8, 0, 0), points, 0.0))
    return made


@pytest.mark.parametrize(
    ("throughputs", "remarks", "is_explained"),
    [
        # 4 % more than what was there is no reason to change it: it ranks first, and is not the best.
        ((1000, 1040), ["less than 5% better", "best, as it was"], True),
        ((1000, 1100, 1140), ["less than 5% better", "best", "as it was"], True),
        ((1000, 1100, 1160), ["best", "", "as it was"], False),
        ((1000, 900), ["best, as it was", ""], False),
    ],
)
def test_a_row_above_the_best_says_why_it_is_not_the_best(
    throughputs: tuple[float, ...], remarks: list[str], is_explained: bool
) -> None:
    found = result(*throughputs)
    assert [row[-1] for row in rank_rows(found)] == remarks
    assert len(above_best(found)) == sum("less than" in remark for remark in remarks)
    assert any(WHY in note for note in notes(found)) is is_explained
    assert (WHY in html_report(found)) is is_explained
    document = tune_document(found)
    assert any(WHY in note for note in document["notes"]) is is_explained
    assert all(len(row) == len(COLUMNS) for row in rank_rows(found))


@pytest.mark.parametrize(("percentile", "name"), [(99.0, "p99 latency"), (None, "mean latency")])
def test_before_and_after_are_told(percentile: float | None, name: str) -> None:
    found = result(1000, 2000, percentile=percentile)
    found.parity = Parity(
        differences=(Difference("p", 0.0, 0.0, 0.0, 1.0),), num_samples=40, accuracy_before=0.975, accuracy_after=0.95
    )
    assert before_after_rows(found) == [
        ("size", "1.0 kB", "1.0 kB", "+0.0 %"),
        ("inferences/s", "1,000", "2,000", "+100.0 %"),
        (f"{name}, 1 in flight", "4.000 ms", "2.000 ms", "-50.0 %"),
        (f"{name}, 4 in flight", "4.000 ms", "2.000 ms", "-50.0 %"),
        ("accuracy, 40 samples", "97.50%", "95.00%", "-2.50 points"),
    ]
    page = html_report(found)
    for text in ("Before and after", "accuracy, 40 samples", "same answer"):
        assert text in page
    document = json.loads(json.dumps(tune_document(found)))["before_after"]
    assert document["size_bytes"] == {"before": 1000, "after": 1000}
    assert document["latency_ms"][1] == {"concurrency": 4, "before": 4.0, "after": 2.0}
    assert document["accuracy"] == {"before": 0.975, "after": 0.95}
    assert document["outputs"][0]["agreement"] == 1.0


def test_what_is_not_known_is_not_told(tmp_path: Path) -> None:
    found = result(1000)
    found.num_bytes, found.not_compared = None, "the model is decoupled"
    assert next(row[0] for row in before_after_rows(found)) == "inferences/s"
    assert "the answers before and after were not compared: the model is decoupled" in notes(found)
    assert tune_document(found)["before_after"]["not_compared"] == "the model is decoupled"
    nothing = result()
    assert before_after_rows(nothing) == []
    assert "No setting could be measured" in html_report(nothing)
    assert tune_document(nothing)["before_after"] is None
