"""Models that answer within `submit`, through the model that chooses that scheduler for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from support.batching import batching_config, load_model, request
from support.instances import Doubling, backend_of

from modelserver.config.schema import InstanceGroupKind, ModelInstanceGroup
from modelserver.errors import CancelledError, InternalError, ServerError, UnavailableError
from modelserver.execution.model import Model
from modelserver.telemetry.statistics_snapshot import FailureReason


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    loop = asyncio.get_running_loop()
    loaded = await asyncio.to_thread(load_model, backend_of(Doubling, runs_inline=True), batching_config(), loop)
    yield loaded
    await asyncio.to_thread(loaded.close)


async def test_the_answer_is_there_when_submit_returns(model: Model) -> None:
    stream = model.submit(request(value=3.0))
    assert stream.is_finished
    assert (await stream.only()).outputs[0].data.flat[0] == 6.0
    assert model.inflight == 0
    assert model.statistics.snapshot().execution_count == 1


@pytest.mark.parametrize(
    ("fields", "error", "reason"),
    [
        ({"is_cancelled": True}, CancelledError, FailureReason.CANCELED),
        ({"deadline_ns": 1}, UnavailableError, FailureReason.REJECTED),
    ],
)
async def test_what_nobody_waits_for_is_not_executed(
    model: Model, fields: dict[str, object], error: type[ServerError], reason: FailureReason
) -> None:
    with pytest.raises(error):
        model.submit(request(**fields))
    numbers = model.statistics.snapshot()
    assert (numbers.execution_count, numbers.failures[reason]) == (0, 1)


async def test_a_deadline_to_come_is_no_hindrance(model: Model) -> None:
    assert model.submit(request(deadline_ns=time.monotonic_ns() + 10**12)).is_finished


async def test_a_stopped_model_refuses(model: Model) -> None:
    model.stop()
    with pytest.raises(UnavailableError, match="being unloaded"):
        model.submit(request())
    assert await model.drain(1)


async def test_a_failing_instance_fails_its_request_alone() -> None:
    class Moody(Doubling):
        def run(self, inputs):
            if inputs["IN"].flat[0] < 0:
                raise ValueError("no negative numbers")
            return super().run(inputs)

    loop = asyncio.get_running_loop()
    moody = await asyncio.to_thread(load_model, backend_of(Moody, runs_inline=True), batching_config(), loop)
    try:
        with pytest.raises(InternalError, match="no negative numbers"):
            await moody.submit(request(value=-1.0)).only()
        assert (await moody.submit(request(value=1.0)).only()).error is None
    finally:
        await asyncio.to_thread(moody.close)


async def test_instances_take_turns_and_can_change_in_place(model: Model) -> None:
    def groups(count: int) -> tuple[ModelInstanceGroup, ...]:
        return (ModelInstanceGroup("m_0", InstanceGroupKind.KIND_CPU, count),)

    await asyncio.to_thread(model.update_instances, replace(model.config, instance_group=groups(3)))
    for _ in range(6):
        model.submit(request())
    assert [info.executions for info in model.instances()] == [2, 2, 2]
    await asyncio.to_thread(model.update_instances, replace(model.config, instance_group=groups(1)))
    for _ in range(4):
        assert model.submit(request()).is_finished
    assert [info.executions for info in model.instances()] == [6]


async def test_nothing_is_lost_while_instances_come_and_go(model: Model) -> None:
    async def change() -> None:
        for count in (2, 1, 4, 1, 3) * 4:
            group = (ModelInstanceGroup("m_0", InstanceGroupKind.KIND_CPU, count),)
            await asyncio.to_thread(model.update_instances, replace(model.config, instance_group=group))

    changing = asyncio.ensure_future(change())
    answered = 0
    while not changing.done():
        assert (await model.submit(request(value=answered)).only()).outputs[0].data.flat[0] == 2 * answered
        answered += 1
        await asyncio.sleep(0)
    await changing
    assert model.statistics.snapshot().success.count == answered
