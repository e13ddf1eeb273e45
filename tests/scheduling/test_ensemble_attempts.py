"""Steps of ensembles that may take only so long, and that are tried again: time is the test's."""

from __future__ import annotations

from typing import Any

import pytest
from support.ensembles import Ensemble, StepDouble, ensemble_config, model_config, step

from modelserver.errors import (
    CancelledError,
    ErrorCode,
    InternalError,
    InvalidArgumentError,
    QueueFullError,
    QueueTimeoutError,
    ServerError,
    UnavailableError,
)

STEPS = (step("a", {"X": "IN"}, {"Y": "mid"}), step("b", {"X": "mid"}, {"Y": "OUT"}))


def chain(limits: dict[str, str], *, is_decoupled: bool = False, **options: Any) -> Ensemble:
    """IN -> a -> mid -> b -> OUT."""
    config = ensemble_config(*STEPS, limits=limits, **options)
    return Ensemble(config, StepDouble(model_config("a", is_decoupled=is_decoupled)), StepDouble(model_config("b")))


def counted(ensemble: Ensemble) -> dict[tuple[str, str], float]:
    """Metrics by name (its end) and step (its beginning)."""
    return {
        (each.name.rpartition("_")[2], each.labels["step"].partition(" ")[0]): each.value
        for each in ensemble.scheduler.step_counts.measure()
    }


@pytest.mark.parametrize("error", [InternalError("it died"), UnavailableError("not now"), ServerError("who knows")])
def test_a_step_that_failed_is_tried_again(error: ServerError) -> None:
    ensemble = chain({"a.retries": "2"})
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    first.fail(error)
    assert not first.waiting
    ensemble.wait(0.009)
    assert not first.waiting
    ensemble.wait(0.001)
    assert first.waiting[0].inputs["X"].data.tolist() == [1]
    first.answer(Y=[2])
    second.answer(Y=[3])
    assert answer.only == {"OUT": [3]}
    assert counted(ensemble) == {("retries", "step[0]"): 1}
    assert ensemble.statistics.snapshot().success.count == 1
    assert not any(not timer.is_cancelled for timer in ensemble.loop.timers)


def test_pauses_grow_and_the_last_failure_is_the_answer() -> None:
    ensemble = chain({"0.retries": "3"})
    [first, _] = ensemble.models
    answer = ensemble.submit(IN=[1])
    for pause_s in (0.01, 0.02, 0.04):
        first.fail(InternalError("again"))
        ensemble.wait(pause_s - 0.001)
        assert not first.waiting
        ensemble.wait(0.001)
        assert first.waiting
    first.fail(InternalError("in the end"))
    assert answer.error.message == "in ensemble 'e', in the end; failed at step[0] (model 'a')"
    assert counted(ensemble) == {("retries", "step[0]"): 3}


def test_a_model_that_refuses_at_once_is_asked_again() -> None:
    ensemble = chain({"b.retries": "1"})
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    second.refusal = QueueFullError("full")
    first.answer(Y=[2])
    assert not answer.responses
    second.refusal = None
    ensemble.wait(0.01)
    second.answer(Y=[3])
    assert answer.only == {"OUT": [3]}


@pytest.mark.parametrize(
    "error", [InvalidArgumentError("wrong"), CancelledError("gone"), ServerError("unable", code=ErrorCode.UNSUPPORTED)]
)
def test_what_would_fail_again_is_not_tried_again(error: ServerError) -> None:
    ensemble = chain({"a.retries": "2"})
    answer = ensemble.submit(IN=[1])
    ensemble.models[0].fail(error)
    assert answer.error.code is error.code


@pytest.mark.parametrize("fields", [{"sequence_id": 7, "sequence_start": True}, {"deadline_ns": 5_000_000}])
def test_requests_that_must_not_be_repeated_or_have_no_time(fields: dict[str, Any]) -> None:
    """A deadline of 5 ms is over before the pause of 10 ms is."""
    ensemble = chain({"a.retries": "2"})
    answer = ensemble.submit(IN=[1], **fields)
    ensemble.models[0].fail(InternalError("it died"))
    assert answer.error.message.startswith("in ensemble 'e', it died; failed at step[")


def test_a_step_without_retries_fails_at_once_beside_one_that_has_some() -> None:
    ensemble = chain({"a.retries": "2"})
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    first.answer(Y=[2])
    second.fail(InternalError("it died"))
    assert answer.error.message.startswith("in ensemble 'e', it died; failed at step[1]")


def test_an_attempt_that_takes_too_long_is_given_up() -> None:
    ensemble = chain({"a.timeout_microseconds": "2000"})
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    [late] = first.waiting
    ensemble.wait(0.002)
    assert late.is_cancelled
    assert isinstance(answer.error, QueueTimeoutError)
    assert answer.error.message == (
        "in ensemble 'e', it was not answered within the 2000 us that the ensemble's config gives it; "
        "failed at step[0] (model 'a')"
    )
    first.answer(Y=[2])  # nobody listens
    assert len(answer.responses) == 1
    assert not second.requests
    assert counted(ensemble) == {("timeouts", "step[0]"): 1}


def test_an_attempt_that_took_too_long_is_followed_by_another() -> None:
    ensemble = chain({"a.timeout_microseconds": "2000", "a.retries": "1"}, max_inflight_requests=1)
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    ensemble.wait(0.002)
    ensemble.wait(0.01)
    late, again = first.waiting
    assert (late.is_cancelled, again.is_cancelled) == (True, False)
    first.answer(at=0, Y=[9])  # that of the first attempt, which nobody waits for any more
    assert not second.waiting
    first.answer(Y=[2])
    ensemble.wait(1)
    second.answer(Y=[3])
    assert answer.only == {"OUT": [3]}
    assert counted(ensemble) == {("retries", "step[0]"): 1, ("timeouts", "step[0]"): 1}


def test_an_answer_in_time_stops_the_clock() -> None:
    ensemble = chain({"a.timeout_microseconds": "2000"})
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    first.answer(Y=[2])
    ensemble.wait(1)
    second.answer(Y=[3])
    assert answer.only == {"OUT": [3]}
    assert not counted(ensemble)


def test_a_client_that_leaves_in_a_pause_ends_the_request() -> None:
    ensemble = chain({"a.retries": "2"})
    [first, _] = ensemble.models
    answer = ensemble.submit(IN=[1])
    first.fail(InternalError("it died"))
    answer.request.cancel()
    assert isinstance(answer.error, CancelledError)
    ensemble.wait(1)
    assert not first.waiting
    assert ensemble.scheduler.inflight == 0


def test_a_decoupled_step_has_its_time_for_all_responses() -> None:
    ensemble = chain({"a.timeout_microseconds": "2000"}, is_decoupled=True)
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    first.answer(Y=[2], is_final=False)
    second.answer(Y=[3])
    ensemble.wait(0.002)
    assert answer.values[0] == ({"OUT": [3]}, False)
    assert isinstance(answer.error, QueueTimeoutError)


def test_iterations_are_retried_for_themselves() -> None:
    """Of the responses of a decoupled step each has its own attempts at the next, and answers keep their order."""
    ensemble = chain({"b.retries": "1"}, is_decoupled=True)
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    for value in (1, 2):
        first.answer(Y=[value], is_final=False)
    second.fail(InternalError("once"))
    second.answer(Y=[20])
    assert not answer.responses
    ensemble.wait(0.01)
    second.answer(Y=[10])
    assert [values for values, _ in answer.values] == [{"OUT": [10]}, {"OUT": [20]}]
    first.answer(Y=[3], is_final=False)
    second.fail(InternalError("once"))
    ensemble.wait(0.01)
    second.fail(InternalError("twice"))
    assert answer.error.message.startswith("in ensemble 'e', twice; failed at step[")


def test_inflight_requests_of_a_step_make_room_when_they_fail() -> None:
    ensemble = chain({"b.retries": "1"}, is_decoupled=True, max_inflight_requests=1)
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    for value in (1, 2):
        first.answer(Y=[value], is_final=False)
    assert len(second.waiting) == 1
    second.fail(InternalError("once"))
    assert second.waiting[0].inputs["X"].data.tolist() == [2]
    second.answer(Y=[20])
    ensemble.wait(0.01)
    second.answer(Y=[10])
    assert [values for values, _ in answer.values] == [{"OUT": [10]}, {"OUT": [20]}]
