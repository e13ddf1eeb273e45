from __future__ import annotations

import pytest
from support.batching import batching_config

from modelserver.config.auto_warmup import AutoWarmup, auto_warmup, check_auto_warmup, warmup_rows
from modelserver.config.problem import Report
from modelserver.config.schema import ModelDynamicBatching, ModelInput, ModelSequenceBatching
from modelserver.core.datatype import Datatype

TWO = (ModelInput("A", Datatype.FP32, dims=(-1, 3, -1)), ModelInput("B", Datatype.FP32, dims=(2,)))


def problems(text: str) -> list[str]:
    report = Report("config.pbtxt", None)
    check_auto_warmup(batching_config(input=TWO, parameters={"auto_warmup": text}), report)
    return [problem.message for problem in report.problems]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("true", AutoWarmup()),
        ("TRUE", AutoWarmup()),
        ("2-9", AutoWarmup((2, 9))),
        ("A=1-2,3-4; 5-6", AutoWarmup((5, 6), {"A": ((1, 2), (3, 4))})),
        ("false", None),
        ("", None),
    ],
)
def test_what_the_parameter_says(text: str, asked: AutoWarmup | None) -> None:
    assert auto_warmup(batching_config(parameters={"auto_warmup": text})) == asked
    assert problems(text) == []


def test_ranges_are_those_of_variable_dims() -> None:
    assert AutoWarmup((1, 5)).ranges(TWO[0]) == ((1, 5), (1, 5))
    assert AutoWarmup((1, 5)).ranges(TWO[1]) == ()
    assert AutoWarmup((1, 5), {"A": ((2, 2), (3, 4))}).ranges(TWO[0]) == ((2, 2), (3, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yes please", "expected true, MIN-MAX or INPUT=MIN-MAX"),
        ("5-1", "got '5-1'"),
        ("A=1", "got '1'"),
        ("C=1-2", "expected inputs of the model, got 'C'"),
        ("A=1-2,3-4,5-6", "expected one range or 2 for the variable dims of 'A', got 3"),
    ],
)
def test_what_it_cannot_mean_is_reported(text: str, message: str) -> None:
    [found] = problems(text)
    assert message in found


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({"max_batch_size": 0}, (None,)),
        ({"max_batch_size": 8}, (1, 8)),
        ({"max_batch_size": 8, "dynamic_batching": ModelDynamicBatching(preferred_batch_size=(4, 8))}, (1, 4, 8)),
        ({"max_batch_size": 8, "sequence_batching": ModelSequenceBatching()}, (1,)),
    ],
)
def test_batch_sizes_that_matter(fields: dict[str, object], rows: tuple[int | None, ...]) -> None:
    assert warmup_rows(batching_config(**fields)) == rows  # type: ignore[arg-type]
