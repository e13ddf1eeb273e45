"""The way of requests through the steps of an ensemble, with models that the test answers."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from support.ensembles import Ensemble, StepDouble, ensemble_config, model_config, step

from modelserver.core.datatype import Datatype
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.errors import CancelledError, InternalError, InvalidArgumentError, ServerError, UnavailableError
from modelserver.scheduling.ensemble import Binding
from modelserver.telemetry.statistics_snapshot import FailureReason


def chain(**options: Any) -> Ensemble:
    """IN -> a -> mid -> b -> OUT."""
    config = ensemble_config(step("a", {"X": "IN"}, {"Y": "mid"}), step("b", {"X": "mid"}, {"Y": "OUT"}), **options)
    return Ensemble(config, StepDouble(model_config("a")), StepDouble(model_config("b")))


def diamond() -> Ensemble:
    """IN -> left and right -> join -> OUT; left is asked for UNUSED too."""
    config = ensemble_config(
        step("join", {"P": "l", "Q": "r"}, {"Y": "OUT"}),
        step("left", {"X": "IN"}, {"Y": "l", "Z": "SIDE"}),
        step("right", {"X": "IN"}, {"Y": "r"}),
        outputs=("OUT", "SIDE"),
    )
    return Ensemble(
        config,
        StepDouble(model_config("left", outputs=("Y", "Z"))),
        StepDouble(model_config("right")),
        StepDouble(model_config("join", inputs=("P", "Q"))),
    )


def plus(number: int) -> Any:
    return lambda inputs: {"Y": inputs["X"] + number}


def test_a_step_starts_when_the_one_before_has_answered() -> None:
    ensemble = chain()
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1, 2])
    assert not second.requests
    first.answer(Y=[5])
    assert second.requests[0].inputs["X"].data.tolist() == [5]
    assert not answer.responses
    assert ensemble.scheduler.inflight == 1
    second.answer(Y=[6])
    assert answer.only == {"OUT": [6]}
    assert ensemble.scheduler.inflight == 0


def test_models_that_answer_at_once_do_not_recur() -> None:
    num_steps = 3000
    steps = [step("a", {"X": f"t{index}"}, {"Y": f"t{index + 1}"}) for index in range(num_steps)]
    config = ensemble_config(*steps, inputs=("t0",), outputs=(f"t{num_steps}",))
    ensemble = Ensemble(config, StepDouble(model_config("a"), plus(1)))
    request = ensemble.request()
    request.inputs["t0"] = Tensor("t0", Datatype.INT32, np.zeros(1, np.int32))
    stream = ensemble.scheduler.submit(request)
    responses: list[Any] = []
    stream.subscribe(responses.append)
    assert responses[0].outputs[0].data.tolist() == [num_steps]


def test_tensors_pass_by_reference() -> None:
    ensemble = chain()
    first, second = ensemble.models
    request = ensemble.request(IN=[1, 2])
    given = request.inputs["IN"].data
    ensemble.scheduler.submit(request)
    assert first.requests[0].inputs["X"].data is given
    between = np.arange(3, dtype=np.int32)
    first.answer(Y=between)
    assert second.requests[0].inputs["X"].data is between


def test_steps_without_each_other_run_side_by_side_and_join() -> None:
    ensemble = diamond()
    join, left, right = ensemble.models
    answer = ensemble.submit(IN=[1])
    right.answer(Y=[30])
    assert not join.requests
    left.answer(Y=[4], Z=[5])
    assert {name: value.data.tolist() for name, value in join.requests[0].inputs.items()} == {"P": [4], "Q": [30]}
    join.answer(Y=[34])
    assert answer.only == {"OUT": [34], "SIDE": [5]}


def test_steps_that_no_asked_output_needs_do_not_run() -> None:
    ensemble = diamond()
    join, left, right = ensemble.models
    answer = ensemble.submit(IN=[1], outputs=("SIDE",))
    assert left.requests[0].outputs == ("Z",)
    left.answer(Z=[5])
    assert answer.only == {"SIDE": [5]}
    assert not right.requests
    assert not join.requests


def test_only_outputs_that_are_used_are_asked_for() -> None:
    config = ensemble_config(step("a", {"X": "IN"}, {"Y": "OUT"}))
    ensemble = Ensemble(config, StepDouble(model_config("a", outputs=("Y", "Z"))))
    ensemble.submit(IN=[1])
    assert ensemble.models[0].requests[0].outputs == ("Y",)


def test_everything_about_a_request_goes_to_each_step() -> None:
    ensemble = chain()
    first, second = ensemble.models
    fields: dict[str, Any] = {
        "id": "number 7",
        "parameters": {"temperature": 0.5},
        "priority": 2,
        "timeout_us": 900,
        "deadline_ns": 10_000_000,
        "sequence_id": "s",
        "sequence_start": True,
        "sequence_end": True,
    }
    ensemble.submit(IN=[1], **fields)
    ensemble.clock.advance_us(500)
    first.answer(Y=[1])
    for model in (first, second):
        request = model.requests[0]
        assert {name: getattr(request, name) for name in fields if name != "timeout_us"} == {
            name: value for name, value in fields.items() if name != "timeout_us"
        }
        assert request.version == 1
    assert first.requests[0].timeout_us == 900
    assert second.requests[0].timeout_us == 400  # what is left of it


def test_patience_that_is_over_is_left_to_the_step_to_judge() -> None:
    ensemble = chain()
    first, second = ensemble.models
    ensemble.submit(IN=[1], timeout_us=100)
    ensemble.clock.advance_us(500)
    first.answer(Y=[1])
    assert second.requests[0].timeout_us == 1


@pytest.mark.parametrize("error", [InvalidArgumentError("too long"), UnavailableError("full"), InternalError("oops")])
def test_the_error_of_a_step_is_that_of_the_request(error: ServerError) -> None:
    ensemble = diamond()
    join, left, right = ensemble.models
    answer = ensemble.submit(IN=[1])
    left.fail(error)
    assert type(answer.error) is type(error)
    assert answer.error.code is error.code
    assert answer.error.message == f"in ensemble 'e', {error.message}; failed at step[1] (model 'left')"
    assert right.requests[0].is_cancelled
    right.answer(Y=[1])  # nobody waits for it any more
    assert not join.requests
    assert len(answer.responses) == 1
    assert ensemble.scheduler.inflight == 0
    snapshot = ensemble.statistics.snapshot()
    assert snapshot.failures[FailureReason.OTHER] == 1
    assert snapshot.success.count == 0


def test_a_step_that_is_refused_ends_the_request() -> None:
    ensemble = chain()
    ensemble.models[1].refusal = UnavailableError("the queue is full")
    answer = ensemble.submit(IN=[1])
    ensemble.models[0].answer(Y=[1])
    assert answer.error.message == "in ensemble 'e', the queue is full; failed at step[1] (model 'b')"


def test_a_tensor_that_does_not_fit_the_next_model_ends_the_request() -> None:
    config = ensemble_config(step("a", {"X": "IN"}, {"Y": "mid"}), step("b", {"X": "mid"}, {"Y": "OUT"}))
    ensemble = Ensemble(config, StepDouble(model_config("a"), plus(0)), StepDouble(model_config("b", dims=(2,))))
    with pytest.raises(
        InvalidArgumentError, match=r"unexpected shape for input 'X'.*; failed at step\[1\] \(model 'b'\)"
    ):
        ensemble.run(IN=[1, 2, 3])


def test_a_client_that_leaves_cancels_the_steps_under_way_and_starts_no_more() -> None:
    ensemble = diamond()
    join, left, right = ensemble.models
    answer = ensemble.submit(IN=[1])
    left.answer(Y=[1], Z=[1])
    answer.request.cancel()
    assert isinstance(answer.error, CancelledError)
    assert right.requests[0].is_cancelled
    assert not left.requests[0].is_cancelled  # it was answered before
    right.answer(Y=[1])
    assert not join.requests
    assert ensemble.statistics.snapshot().failures[FailureReason.CANCELED] == 1
    answer.request.cancel()
    assert len(answer.responses) == 1


def test_a_request_whose_client_has_left_or_is_late_is_refused() -> None:
    ensemble = chain()
    request = ensemble.request(IN=[1])
    request.cancel()
    with pytest.raises(CancelledError):
        ensemble.scheduler.submit(request)
    with pytest.raises(UnavailableError, match="Request timeout expired"):
        ensemble.submit(IN=[1], deadline_ns=1)
    assert ensemble.scheduler.inflight == 0


def test_statistics_count_the_whole_way_and_the_work_on_it() -> None:
    ensemble = chain(max_batch_size=0)
    ensemble.submit(IN=[1], rows=3)
    ensemble.clock.advance_us(40)
    ensemble.models[0].note(1_000, 2_000, 10_000, 15_000)
    ensemble.models[0].answer(Y=[1])
    ensemble.clock.advance_us(2)
    ensemble.models[1].note(0, 10, 110, 111)
    ensemble.models[1].answer(Y=[1])
    snapshot = ensemble.statistics.snapshot()
    assert (snapshot.success.count, snapshot.success.ns) == (1, 42_000)
    assert (snapshot.queue.count, snapshot.queue.ns) == (1, 0)
    assert (snapshot.compute_input.count, snapshot.compute_input.ns) == (1, 1_010)
    assert (snapshot.compute_infer.count, snapshot.compute_infer.ns) == (1, 8_100)
    assert (snapshot.compute_output.count, snapshot.compute_output.ns) == (1, 5_001)
    assert (snapshot.inference_count, snapshot.execution_count) == (3, 1)
    assert list(snapshot.batch_stats) == [3]


def test_what_steps_say_beside_their_outputs_is_passed_on() -> None:
    ensemble = chain()
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    for model, parameters in ((first, {"tokens": 3, "who": "a"}), (second, {"who": "b"})):
        request = model.waiting.pop()
        outputs = [Tensor("Y", Datatype.INT32, np.ones(1, np.int32))]
        request.stream.deliver(InferResponse(outputs, parameters=parameters))
    assert answer.responses[0].parameters == {"tokens": 3, "who": "b"}


def test_models_are_held_as_long_as_a_request_may_need_them() -> None:
    ensemble = chain()
    first, second = ensemble.models
    assert (first.num_holders, second.num_holders) == (1, 1)
    answer = ensemble.submit(IN=[1])
    ensemble.scheduler.stop()
    assert (first.num_holders, second.num_holders) == (1, 1)
    first.answer(Y=[1])
    second.answer(Y=[2])
    assert answer.only == {"OUT": [2]}
    assert (first.num_holders, second.num_holders) == (0, 0)
    with pytest.raises(UnavailableError, match="'e' is being unloaded"):
        ensemble.submit(IN=[1])


def test_a_request_keeps_the_models_that_it_began_with() -> None:
    ensemble = chain()
    first, second = ensemble.models
    answer = ensemble.submit(IN=[1])
    newer = StepDouble(model_config("b"), plus(100))
    ensemble.scheduler.bind(Binding(ensemble.config, [first, newer]))
    assert second.num_holders == 1
    first.answer(Y=[1])
    second.answer(Y=[2])
    assert answer.only == {"OUT": [2]}
    assert second.num_holders == 0
    first.function = plus(1)
    assert ensemble.run(IN=[1]) == {"OUT": [102]}


def test_without_models_requests_are_refused_with_the_reason() -> None:
    ensemble = chain()
    ensemble.scheduler.bind(None, "step[0] needs model 'a', which is not ready")
    with pytest.raises(UnavailableError, match=r"ensemble 'e' cannot take requests: step\[0\] needs model 'a'"):
        ensemble.submit(IN=[1])


async def test_abort_ends_what_runs() -> None:
    config = ensemble_config(step("a", {"X": "IN"}, {"Y": "OUT"}))
    ensemble = Ensemble(config, StepDouble(model_config("a")), loop=asyncio.get_running_loop())
    answer = ensemble.submit(IN=[1])
    idle = asyncio.Event()
    ensemble.scheduler.on_idle = idle.set
    ensemble.scheduler.abort(UnavailableError("unloaded"))
    async with asyncio.timeout(60):
        await idle.wait()
    assert answer.error.message == "unloaded"
    assert ensemble.models[0].requests[0].is_cancelled


# Optional inputs and conditions.


def test_an_optional_input_that_is_not_given_is_not_there_in_the_step_either() -> None:
    config = ensemble_config(
        step("a", {"X": "IN", "EXTRA": "MORE"}, {"Y": "OUT"}), inputs=("IN", "MORE"), optional=("MORE",)
    )
    model = StepDouble(
        model_config("a", inputs=("X", "EXTRA"), optional=("EXTRA",)), lambda inputs: {"Y": [len(inputs)]}
    )
    ensemble = Ensemble(config, model)
    assert ensemble.run(IN=[1]) == {"OUT": [1]}
    assert ensemble.run(IN=[1], MORE=[1]) == {"OUT": [2]}


def branches() -> Ensemble:
    """FLAG chooses: a then b, or c, write OUT."""
    config = ensemble_config(
        step("a", {"X": "IN"}, {"Y": "mid"}),
        step("b", {"X": "mid"}, {"Y": "OUT"}),
        step("c", {"X": "IN"}, {"Y": "OUT"}),
        bools=("FLAG",),
        optional=("FLAG",),
        step0="FLAG",
        step2="!FLAG",
    )
    return Ensemble(
        config, *(StepDouble(model_config(name), plus(add)) for name, add in (("a", 1), ("b", 10), ("c", 5)))
    )


@pytest.mark.parametrize(
    ("flag", "value", "called"), [(True, 11, [1, 1, 0]), (False, 5, [0, 0, 1]), (None, 5, [0, 0, 1])]
)
def test_a_condition_chooses_a_branch(flag: bool | None, value: int, called: list[int]) -> None:
    ensemble = branches()
    assert ensemble.run(IN=[0], FLAG=flag) == {"OUT": [value]}
    assert [len(model.requests) for model in ensemble.models] == called


def test_rows_must_agree_on_a_condition() -> None:
    ensemble = branches()
    assert ensemble.run(IN=[0], FLAG=[True, True]) == {"OUT": [11]}
    with pytest.raises(InvalidArgumentError, match=r"the condition 'FLAG' differs among the rows.*step\[[02]\]"):
        ensemble.run(IN=[0], FLAG=[True, False])


def test_what_needs_a_skipped_step_is_skipped_and_its_outputs_are_absent() -> None:
    config = ensemble_config(
        step("a", {"X": "IN"}, {"Y": "mid"}),
        step("b", {"X": "mid"}, {"Y": "RARE"}),
        step("c", {"X": "IN", "Z": "mid"}, {"Y": "OUT"}),
        outputs=("OUT", "RARE"),
        bools=("FLAG",),
        step0="FLAG",
    )
    count = StepDouble(model_config("c", inputs=("X", "Z"), optional=("Z",)), lambda inputs: {"Y": [len(inputs)]})
    ensemble = Ensemble(config, StepDouble(model_config("a"), plus(1)), StepDouble(model_config("b"), plus(1)), count)
    assert ensemble.run(IN=[0], FLAG=False) == {"OUT": [1]}
    assert ensemble.run(IN=[0], FLAG=True) == {"OUT": [2], "RARE": [2]}
    assert ensemble.run(IN=[0], FLAG=False, outputs=("RARE",)) == {}


def test_a_condition_may_be_what_a_step_has_found_out() -> None:
    config = ensemble_config(
        step("judge", {"X": "IN"}, {"Y": "is_hard"}),
        step("big", {"X": "IN"}, {"Y": "OUT"}),
        step("small", {"X": "IN"}, {"Y": "OUT"}),
        step1="is_hard",
        step2="!is_hard",
    )
    judge = StepDouble(model_config("judge"), lambda inputs: {"Y": inputs["X"] > 5})
    ensemble = Ensemble(
        config, judge, StepDouble(model_config("big"), plus(100)), StepDouble(model_config("small"), plus(1))
    )
    assert ensemble.run(IN=[9]) == {"OUT": [109]}
    assert ensemble.run(IN=[2]) == {"OUT": [3]}


def test_all_skipped_is_an_answer_without_outputs() -> None:
    config = ensemble_config(step("a", {"X": "IN"}, {"Y": "OUT"}), bools=("FLAG",), step0="FLAG")
    ensemble = Ensemble(config, StepDouble(model_config("a"), plus(1)))
    assert ensemble.run(IN=[1], FLAG=False) == {}
    assert ensemble.statistics.snapshot().success.count == 1


def test_nothing_of_a_request_stays_behind() -> None:
    """No cycles: tensors go when the request is over, not when the garbage collector comes."""
    ensemble = chain()
    first, second = ensemble.models
    between = np.arange(3, dtype=np.int32)
    seen = weakref.ref(between)
    gc.disable()
    try:
        answer = ensemble.submit(IN=[1])
        first.answer(Y=between)
        del between
        second.answer(Y=[1])
        assert answer.only == {"OUT": [1]}
        first.requests.clear()
        second.requests.clear()
        assert seen() is None
    finally:
        gc.enable()
