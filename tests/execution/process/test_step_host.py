"""Instances that go in steps in a child process behave as those in the server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import support
from support.batching import batching_config, load_model, request
from support.gate import until
from support.instances import backend_of
from support.stepping import error_of, numbers

from modelserver.backend import InferRequest
from modelserver.config.schema import ModelTransactionPolicy
from modelserver.core.response import ResponseStream
from modelserver.errors import CancelledError, InternalError, UnavailableError
from modelserver.execution.model import Model
from modelserver.execution.process.instance import ProcessInstance
from modelserver.execution.process.recipe import ProcessOptions, Recipe, RestartOptions
from modelserver.telemetry.statistics_snapshot import FailureReason

TESTS = str(Path(next(iter(support.__path__))).parent)
OPTIONS = ProcessOptions(restart=RestartOptions(first_pause_s=0.01))


class Loaded:
    def __init__(self, model: Model, instance: ProcessInstance) -> None:
        self.model = model
        self.instance = instance
        self.requests: list[InferRequest] = []

    def submit(self, end: float, **parameters: str) -> tuple[InferRequest, ResponseStream]:
        made = request(value=end, parameters=parameters)
        made.is_decoupled = True
        self.requests.append(made)
        return made, self.model.submit(made)

    def measured(self) -> dict[str, float]:
        return {measurement.name: measurement.value for measurement in self.instance.measure()}


Load = Callable[..., Awaitable[Loaded]]


@pytest.fixture
async def load() -> AsyncIterator[Load]:
    loaded: list[Loaded] = []

    async def make(most: int = 1000) -> Loaded:
        loop = asyncio.get_running_loop()
        instances: list[ProcessInstance] = []

        def create(_placement: object) -> ProcessInstance:
            recipe = Recipe("support.hosted_steps:create", {"most": most}, python_path=(TESTS,))
            instances.append(ProcessInstance("m_0", recipe, OPTIONS, loop=loop))
            return instances[-1]

        config = batching_config(model_transaction_policy=ModelTransactionPolicy(decoupled=True))
        model = await asyncio.to_thread(load_model, backend_of(create), config, loop)
        loaded.append(Loaded(model, instances[0]))
        return loaded[-1]

    yield make
    for each in loaded:
        for made in each.requests:
            made.cancel()
        each.model.stop()
        await asyncio.to_thread(each.model.close, 10)


async def test_requests_are_answered_counted_measured_and_refused_one_by_one(load: Load) -> None:
    loaded = await load()
    streams = [loaded.submit(end, **({"rows": "yes"} if end == 3 else {}))[1] for end in (3, 1, 0, 500)]
    refused = loaded.submit(-1)[1]
    answers = await asyncio.gather(*map(numbers, streams))
    assert answers == [[*range(1, end + 1)] for end in (3, 1, 0, 500)]
    assert "cannot count to -1" in (await error_of(refused)).message
    # Who has the last answer finds it counted.
    measured = loaded.measured()
    assert measured["test:steps"] >= 501
    assert loaded.instance.measure()[0].labels == {"kind": "any"}
    snapshot = loaded.model.statistics.snapshot()
    assert (snapshot.execution_count, snapshot.success.count) == (4, 4)


async def test_what_has_no_room_waits_in_the_queue(load: Load) -> None:
    loaded = await load(most=2)
    streams = [loaded.submit(50, do="slowly")[1] for _ in range(100)]
    await until(lambda: loaded.model.queue_depth < 100, "some are on their way")
    assert loaded.model.queue_depth > 30
    gone, last = loaded.submit(1)
    gone.cancel()
    assert isinstance(await error_of(last), CancelledError)
    await asyncio.gather(*map(numbers, streams[:2]))
    await until(lambda: loaded.instance.measure()[2].counts == (2, 0), "the child says that it holds two")


async def test_those_who_leave_are_forgotten_and_the_others_stay(load: Load) -> None:
    loaded = await load(most=1)
    leaving = [loaded.submit(1_000_000) for _ in range(3)]  # one that is taken on, two that wait in the child
    iterator = aiter(leaving[0][1])
    await anext(iterator)
    for left, _ in reversed(leaving):
        left.cancel()
    for _, stream in leaving[1:]:
        assert isinstance(await error_of(stream), CancelledError)
    assert await numbers(loaded.submit(2)[1]) == [1, 2]
    await until(lambda: not loaded.model.inflight, "all have ended")
    assert loaded.model.statistics.snapshot().failures[FailureReason.CANCELED] == 3
    assert loaded.measured()["test:aborted"] == 1


async def test_a_step_that_fails_fails_those_at_hand_and_often_the_process(load: Load) -> None:
    loaded = await load()
    pid = loaded.instance.pid
    _, other = loaded.submit(1_000_000)
    await anext(aiter(other))
    failed = await error_of(loaded.submit(5, do="fail")[1])
    assert "ValueError: as asked" in failed.message
    assert await numbers(loaded.submit(2)[1]) == [1, 2]
    assert loaded.instance.pid == pid
    for _ in range(3):
        assert isinstance(await error_of(loaded.submit(5, do="break")[1]), InternalError)
    await until(lambda: loaded.instance.can_execute() and loaded.instance.pid != pid, "another process is there")
    assert await numbers(loaded.submit(2)[1]) == [1, 2]


async def test_a_killed_process_fails_its_requests_and_is_started_anew(load: Load) -> None:
    loaded = await load()
    pid = loaded.instance.pid
    assert pid is not None
    streams = [aiter(loaded.submit(1_000_000)[1]) for _ in range(3)]
    for stream in streams:
        await anext(stream)
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        async for response in stream:
            if response.error is not None:
                break
        assert response.error is not None
        assert "SIGKILL" in response.error.message or "signal 9" in response.error.message
    assert await numbers(loaded.submit(2)[1]) == [1, 2]
    assert loaded.instance.pid != pid


async def test_unloading_waits_and_then_ends_what_is_left(load: Load) -> None:
    loaded = await load()
    _, short = loaded.submit(200, do="slowly")
    _, endless = loaded.submit(1_000_000)
    await anext(aiter(endless))
    loaded.model.stop()
    closing = asyncio.create_task(asyncio.to_thread(loaded.model.close, 2.5))
    assert len(await numbers(short)) == 200
    assert isinstance(await error_of(endless), UnavailableError)
    await closing
