"""Short batches that travel to an instance together, and what must not change by it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from support.batching import batching_config, load_model, request
from support.instances import Choosy, backend_of

from modelserver.backend import InferRequest, InferResponse, Placement, ServerError
from modelserver.core.clock import Clock, SystemClock
from modelserver.errors import InternalError
from modelserver.execution.model import Model
from tests.support.manual_clock import ManualClock


class Far(Choosy):
    """An instance that is worth a journey for several batches; notes how many came together."""

    takes_several_batches = True
    journeys: list[list[int]]
    gate: threading.Event
    delay_s = 0.0

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        type(self).journeys = []
        type(self).gate = threading.Event()
        type(self).gate.set()

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse | ServerError]:
        self.gate.wait(10)
        time.sleep(self.delay_s)
        if any(each.inputs["IN"].data.flat[0] == -1 for each in requests):
            raise InternalError("minus one is not to my taste")
        return super().execute(requests)

    def execute_batches(
        self, batches: Sequence[Sequence[InferRequest]]
    ) -> Sequence[Sequence[InferResponse | ServerError] | ServerError]:
        self.journeys.append([len(requests) for requests in batches])
        return super().execute_batches(batches)


async def _answers(model: Model, values: Sequence[float]) -> list[float | str]:
    """Everything that is submitted while the instance is held at its gate, once that opens."""
    Far.gate.clear()
    streams = [model.submit(request(value=value)) for value in values]
    await asyncio.sleep(0.05)
    Far.gate.set()
    answers: list[float | str] = []
    for stream in streams:
        try:
            answers.append(float((await stream.only()).outputs[0].data.flat[0]))
        except ServerError as error:
            answers.append(error.message)
    return answers


@asynccontextmanager
async def _served(clock: Clock) -> AsyncIterator[Model]:
    loop = asyncio.get_running_loop()
    loaded = await asyncio.to_thread(load_model, backend_of(Far), batching_config(), loop, clock=clock)
    for value in range(100):  # until it is known how long a batch takes
        await loaded.submit(request(value=value)).only()
    Far.journeys.clear()
    yield loaded
    await asyncio.to_thread(loaded.close)


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    """By a clock that stands still every batch is quick, the one that is held at the gate too."""
    async with _served(ManualClock()) as loaded:
        yield loaded


async def test_batches_that_wait_travel_together_and_stay_batches(model: Model) -> None:
    before = model.statistics.snapshot().execution_count
    assert await _answers(model, range(12)) == [2.0 * value for value in range(12)]
    # Whatever came first may have gone alone, and one that was left over.
    assert sum(map(len, Far.journeys)) >= 11
    assert {size for journey in Far.journeys for size in journey} == {1}
    assert model.statistics.snapshot().execution_count - before == 12


async def test_one_that_fails_leaves_its_companions_alone(model: Model) -> None:
    answers = await _answers(model, [1, 2, -1, 4, 5])
    assert answers == [2.0, 4.0, "minus one is not to my taste", 8.0, 10.0]


async def test_slow_batches_travel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _served(SystemClock()) as model:
        monkeypatch.setattr(Far, "delay_s", 0.01)
        await model.submit(request()).only()
        Far.journeys.clear()
        await _answers(model, range(6))
        assert Far.journeys == []
