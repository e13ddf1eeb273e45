"""Ensembles with steps that answer any number of times: what follows runs once for each of the answers."""

from __future__ import annotations

from typing import Any

import pytest
from support.ensembles import Ensemble, SlowReader, StepDouble, ensemble_config, model_config, step

from modelserver.errors import CancelledError, InternalError
from modelserver.telemetry.statistics_snapshot import FailureReason


def source_and_sink(**options: Any) -> Ensemble:
    """IN -> many -> mid -> one -> OUT."""
    config = ensemble_config(
        step("many", {"X": "IN"}, {"Y": "mid"}), step("one", {"X": "mid"}, {"Y": "OUT"}), **options
    )
    return Ensemble(config, StepDouble(model_config("many", is_decoupled=True)), StepDouble(model_config("one")))


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"Y": inputs["X"] * 2}


def test_each_response_goes_on_and_the_end_comes_last() -> None:
    ensemble = source_and_sink()
    many, one = ensemble.models
    one.function = double
    answer = ensemble.submit(IN=[0])
    many.answer(Y=[1], is_final=False)
    many.answer(Y=[2], is_final=False)
    assert answer.values == [({"OUT": [2]}, False), ({"OUT": [4]}, False)]
    many.answer()
    assert answer.values[2:] == [({}, True)]
    snapshot = ensemble.statistics.snapshot()
    assert snapshot.success.count == 1
    assert [snapshot.response_stats[position].success.count for position in (0, 1, 2)] == [1, 1, 0]
    assert snapshot.response_stats[2].empty_response.count == 1


def test_the_last_answer_is_final_when_the_end_is_known() -> None:
    ensemble = source_and_sink()
    many, one = ensemble.models
    answer = ensemble.submit(IN=[0])
    many.answer(Y=[1], is_final=True)
    one.answer(Y=[7])
    assert answer.values == [({"OUT": [7]}, True)]


def test_the_end_before_the_last_steps_are_done_waits_for_them() -> None:
    ensemble = source_and_sink()
    many, one = ensemble.models
    answer = ensemble.submit(IN=[0])
    many.answer(Y=[1], is_final=False)
    many.answer()
    assert answer.values == []
    one.answer(Y=[3])
    assert answer.values == [({"OUT": [3]}, True)]


def test_no_response_at_all_is_an_empty_end() -> None:
    ensemble = source_and_sink()
    answer = ensemble.submit(IN=[0])
    ensemble.models[0].answer()
    assert answer.values == [({}, True)]


def test_answers_keep_the_order_of_their_source() -> None:
    ensemble = source_and_sink()
    many, one = ensemble.models
    answer = ensemble.submit(IN=[0])
    for value in (1, 2, 3):
        many.answer(Y=[value], is_final=False)
    one.answer(at=1, Y=[20])
    one.answer(at=1, Y=[30])
    assert answer.values == []
    one.answer(Y=[10])
    assert [value for value, _ in answer.values] == [{"OUT": [10]}, {"OUT": [20]}, {"OUT": [30]}]


def test_tensors_of_the_whole_request_join_each_response() -> None:
    config = ensemble_config(
        step("many", {"X": "IN"}, {"Y": "mid"}),
        step("slow", {"X": "IN"}, {"Y": "once"}),
        step("join", {"P": "mid", "Q": "once", "R": "IN"}, {"Y": "OUT"}),
    )
    ensemble = Ensemble(
        config,
        StepDouble(model_config("many", is_decoupled=True)),
        StepDouble(model_config("slow")),
        StepDouble(
            model_config("join", inputs=("P", "Q", "R")),
            lambda inputs: {"Y": [int(inputs[name][0]) for name in "PQR"]},
        ),
    )
    many, slow, _ = ensemble.models
    answer = ensemble.submit(IN=[5])
    many.answer(Y=[1], is_final=False)
    assert answer.values == []
    slow.answer(Y=[9])
    assert answer.values == [({"OUT": [1, 9, 5]}, False)]
    many.answer(Y=[2])
    assert answer.values[1:] == [({"OUT": [2, 9, 5]}, True)]


def test_decoupled_steps_may_follow_each_other() -> None:
    config = ensemble_config(
        step("outer", {"X": "IN"}, {"Y": "o"}),
        step("inner", {"X": "o"}, {"Y": "i"}),
        step("join", {"P": "o", "Q": "i"}, {"Y": "OUT"}),
    )
    ensemble = Ensemble(
        config,
        StepDouble(model_config("outer", is_decoupled=True)),
        StepDouble(model_config("inner", is_decoupled=True)),
        StepDouble(
            model_config("join", inputs=("P", "Q")), lambda inputs: {"Y": [int(inputs["P"][0]), int(inputs["Q"][0])]}
        ),
    )
    outer, inner, _ = ensemble.models
    answer = ensemble.submit(IN=[0])
    outer.answer(Y=[1], is_final=False)
    outer.answer(Y=[2])
    inner.answer(at=1, Y=[20], is_final=False)
    inner.answer(at=0, Y=[10], is_final=False)
    inner.answer(at=0)
    assert [value["OUT"] for value, _ in answer.values] == [[2, 20], [1, 10]]
    inner.answer(Y=[21])
    assert answer.values[2:] == [({"OUT": [2, 21]}, True)]


def test_two_decoupled_branches_may_write_the_same_tensor() -> None:
    config = ensemble_config(
        step("up", {"X": "IN"}, {"Y": "mid"}),
        step("down", {"X": "IN"}, {"Y": "mid", "Z": "extra"}),
        step("sink", {"X": "mid", "E": "extra"}, {"Y": "OUT"}),
        bools=("FLAG",),
        step0="FLAG",
        step1="!FLAG",
    )
    ensemble = Ensemble(
        config,
        StepDouble(model_config("up", is_decoupled=True)),
        StepDouble(model_config("down", outputs=("Y", "Z"), is_decoupled=True)),
        StepDouble(model_config("sink", inputs=("X", "E"), optional=("E",)), lambda inputs: {"Y": [len(inputs)]}),
    )
    up, down, _ = ensemble.models
    first, second = ensemble.submit(IN=[0], FLAG=True), ensemble.submit(IN=[0], FLAG=False)
    up.answer(Y=[1])
    assert first.values == [({"OUT": [1]}, True)]
    down.answer(Y=[1], Z=[2])
    assert second.values == [({"OUT": [2]}, True)]


def test_responses_whose_steps_are_skipped_give_no_answer() -> None:
    config = ensemble_config(
        step("many", {"X": "IN"}, {"Y": "mid", "Z": "keep"}), step("one", {"X": "mid"}, {"Y": "OUT"}), step1="keep"
    )
    ensemble = Ensemble(
        config,
        StepDouble(model_config("many", outputs=("Y", "Z"), is_decoupled=True)),
        StepDouble(model_config("one"), double),
    )
    many, _ = ensemble.models
    answer = ensemble.submit(IN=[0])
    for value, keep in ((1, True), (2, False), (3, True)):
        many.answer(Y=[value], Z=[keep], is_final=False)
    many.answer()
    assert answer.values == [({"OUT": [2]}, False), ({"OUT": [6]}, False), ({}, True)]


def test_an_error_of_one_response_ends_the_request() -> None:
    ensemble = source_and_sink()
    many, one = ensemble.models
    answer = ensemble.submit(IN=[0])
    many.answer(Y=[1], is_final=False)
    many.answer(Y=[2], is_final=False)
    one.answer(Y=[1])
    one.fail(InternalError("broken"))
    assert answer.error.message == "in ensemble 'e', broken; failed at step[1] (model 'one')"
    assert many.requests[0].is_cancelled
    many.answer(Y=[3])
    assert len(answer.responses) == 2
    assert ensemble.statistics.snapshot().failures[FailureReason.OTHER] == 1


def test_a_client_that_leaves_stops_the_source() -> None:
    ensemble = source_and_sink()
    many, one = ensemble.models
    answer = ensemble.submit(IN=[0])
    many.answer(Y=[1], is_final=False)
    answer.request.cancel()
    assert isinstance(answer.error, CancelledError)
    assert many.requests[0].is_cancelled
    assert one.requests[0].is_cancelled
    assert ensemble.statistics.snapshot().response_stats[0].cancel.count == 1


@pytest.mark.parametrize("limit", [1, 2])
def test_a_step_has_no_more_requests_in_flight_than_allowed(limit: int) -> None:
    ensemble = source_and_sink(max_inflight_requests=limit)
    many, one = ensemble.models
    answer = ensemble.submit(IN=[0])
    for value in range(5):
        many.answer(Y=[value], is_final=False)
        assert len(one.waiting) == min(value + 1, limit)
    many.answer()
    for value in range(5):
        assert len(one.waiting) == min(5 - value, limit)
        one.answer(Y=[value])
    assert [value for value, _ in answer.values] == [{"OUT": [value]} for value in range(5)]
    assert answer.values[-1][1]


def test_the_source_may_go_on_as_its_responses_are_worked_off() -> None:
    ensemble = source_and_sink(max_inflight_requests=1)
    many, one = ensemble.models
    num_read = 0

    def read() -> None:
        nonlocal num_read
        num_read += 1

    ensemble.submit(IN=[0])
    stream = many.requests[0].stream
    assert stream.reads_later
    stream.on_read = read
    many.answer(Y=[1], is_final=False)
    many.answer(Y=[2], is_final=False)
    assert num_read == 0
    one.answer(Y=[1])
    assert num_read == 1
    one.answer(Y=[1])
    assert num_read == 2


def test_a_client_that_reads_slowly_holds_the_source_back() -> None:
    ensemble = source_and_sink()
    many, one = ensemble.models
    one.function = double
    num_read = 0

    def read() -> None:
        nonlocal num_read
        num_read += 1

    stream = SlowReader()
    answer = ensemble.submit(IN=[0], stream=stream)
    many.requests[0].stream.on_read = read
    many.answer(Y=[1], is_final=False)
    many.answer(Y=[2], is_final=False)
    assert len(answer.responses) == 2
    assert num_read == 0
    stream.has_read()
    assert num_read == 1
    many.answer()
    assert answer.values[-1] == ({}, True)
    stream.has_read()
    assert num_read == 2  # the end needs no reading, and the second answer nobody waits for any more


def test_answers_that_are_complete_come_before_the_error() -> None:
    ensemble = source_and_sink()
    many, one = ensemble.models

    def refuse_two(inputs: dict[str, Any]) -> dict[str, Any]:
        if int(inputs["X"][0]) == 2:
            raise InternalError("not two")
        return {"Y": inputs["X"]}

    one.function = refuse_two
    answer = ensemble.submit(IN=[0])
    many.answer(Y=[1], is_final=False)
    many.answer(Y=[2], is_final=False)
    assert answer.values[0] == ({"OUT": [1]}, False)
    assert answer.error.message.startswith("in ensemble 'e', not two; failed at step[")
