"""A batch that nobody waits for any more is ended, and no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import numpy as np
import pytest
from support.batching import batching_config, load_model
from support.batching import request as batching_request
from support.instances import backend_of

from modelserver.backend import Array, Datatype, Tensor, TensorInstance
from modelserver.config.pbtxt import parse_pbtxt
from modelserver.config.schema import ModelDynamicBatching
from modelserver.config.signature import ModelSignature
from modelserver.core.clock import SystemClock
from modelserver.core.request import InFlightRequest
from modelserver.errors import CancelledError
from modelserver.execution.assemble import Assembler
from modelserver.execution.executor import Executor
from modelserver.execution.inline import InlineGuard
from modelserver.execution.runner import Runner
from modelserver.scheduling.batch import Batch
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason

CONFIG = 'name: "m" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'  # noqa: E501


class Waiting(TensorInstance):
    """Runs until it is let go or interrupted."""

    can_be_interrupted = True

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.may_end = threading.Event()
        self.is_interrupted = False

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.runs.set()
        assert self.may_end.wait(30)
        if self.is_interrupted:
            raise CancelledError("interrupted")
        return {"y": inputs["x"] * 2}

    def interrupt(self, is_wanted: bool) -> None:
        self.is_interrupted = is_wanted
        if is_wanted:
            self.may_end.set()


def request() -> InFlightRequest:
    return InFlightRequest(
        model_name="m", version=None, inputs={"x": Tensor("x", Datatype.FP32, np.ones((1, 1), np.float32))}
    )


def executed(instance: Waiting, requests: list[InFlightRequest], statistics: ModelStatistics) -> threading.Thread:
    assembler = Assembler(ModelSignature(parse_pbtxt(CONFIG, "config.pbtxt").config))
    executor = Executor(instance, assembler, instance_name="m_0", clock=SystemClock())
    runner = Runner(executor, statistics, SystemClock())
    answers: list[object] = []

    def run() -> None:
        batch = Batch(requests, [0] * len(requests), len(requests), 0)
        answers.extend(response.error for _, response in runner.run(batch))

    thread = threading.Thread(target=run)
    thread.answers = answers  # type: ignore[attr-defined]
    thread.start()
    return thread


@pytest.mark.parametrize("num_requests", [1, 3])
def test_a_batch_ends_when_its_last_client_has_left(num_requests: int) -> None:
    instance, statistics = Waiting(), ModelStatistics()
    requests = [request() for _ in range(num_requests)]
    told: list[InFlightRequest] = []
    for one in requests:
        one.on_cancel = told.append
    thread = executed(instance, requests, statistics)
    assert instance.runs.wait(30)
    for one in requests[:-1]:
        one.cancel()
        assert not instance.is_interrupted
    requests[-1].cancel()
    thread.join(30)
    assert all(isinstance(error, CancelledError) for error in thread.answers)  # type: ignore[attr-defined]
    assert told == requests, "the scheduler was not told"
    assert not instance.is_interrupted, "the next batch would be interrupted"
    failures = statistics.snapshot().failures
    assert (failures[FailureReason.CANCELED], failures[FailureReason.BACKEND]) == (num_requests, 0)


def test_nobody_else_is_interrupted() -> None:
    instance, statistics = Waiting(), ModelStatistics()
    requests = [request(), request()]
    thread = executed(instance, requests, statistics)
    assert instance.runs.wait(30)
    requests[0].cancel()
    instance.may_end.set()
    thread.join(30)
    assert thread.answers == [None, None]  # type: ignore[attr-defined]
    requests[1].cancel()  # it is over
    assert not instance.is_interrupted


def test_what_was_cancelled_before_is_not_executed() -> None:
    instance, statistics = Waiting(), ModelStatistics()
    one = request()
    one.cancel()
    thread = executed(instance, [one], statistics)
    thread.join(30)
    assert not instance.runs.is_set()
    assert isinstance(thread.answers[0], CancelledError)  # type: ignore[attr-defined]


async def test_a_client_that_leaves_and_an_unload_that_has_waited_end_a_run() -> None:
    """Through a whole model: its scheduler, its worker, and its end."""
    closed: list[bool] = []

    class Endless(Waiting):
        def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            super().run(inputs)
            raise AssertionError("nobody interrupts it")

        def interrupt(self, is_wanted: bool) -> None:
            super().interrupt(is_wanted)
            if not is_wanted:
                self.runs.clear()
                self.may_end.clear()

        def close(self) -> None:
            closed.append(True)

    instance = Endless()
    loop = asyncio.get_running_loop()
    config = batching_config(dynamic_batching=ModelDynamicBatching())
    model = await asyncio.to_thread(load_model, backend_of(lambda _: instance), config, loop)
    first = batching_request()
    stream = model.submit(first)
    assert await asyncio.to_thread(instance.runs.wait, 30)
    first.cancel()
    with pytest.raises(CancelledError):
        await stream.only()
    stream = model.submit(batching_request())
    assert await asyncio.to_thread(instance.runs.wait, 30)
    await asyncio.to_thread(model.close, 0.01)
    with pytest.raises(CancelledError):
        await stream.only()
    assert closed == [True], "the instance is abandoned, and its memory with it"


@pytest.mark.parametrize("num_requests", [1, 3])
def test_on_the_event_loop_nobody_can_leave_meanwhile_and_nobody_is_watched(num_requests: int) -> None:
    told: list[InFlightRequest] = []
    requests = [request() for _ in range(num_requests)]
    for one in requests:
        one.on_cancel = told.append
    watched: list[bool] = []

    class Looking(Waiting):
        def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            watched.append(requests[0].on_cancel != told.append)
            return {"y": inputs["x"]}

    assembler = Assembler(ModelSignature(parse_pbtxt(CONFIG, "config.pbtxt").config))
    executor = Executor(Looking(), assembler, instance_name="m_0", clock=SystemClock())
    runner = Runner(executor, ModelStatistics(), SystemClock())
    for guard in (None, InlineGuard(lambda: None), None):
        runner.guard = guard
        runner.run(Batch(requests, [0] * num_requests, num_requests, 0))
    assert watched == [True, False, True]
