"""Short batches that travel to an instance together, and what must not change by it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from support.batching import batching_config, load_model, request
from support.instances import Choosy, backend_of

from modelserver.backend import InferRequest, InferResponse, Placement, ServerError, Tensor
from modelserver.errors import InternalError
from modelserver.execution.model import Model


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

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | ServerError]:
        self.gate.wait(10)
        time.sleep(self.delay_s)
        if any(each.inputs["IN"].data.flat[0] == -1 for each in requests):
            raise InternalError("minus one is not to my taste")
        return [
            InferResponse([Tensor("OUT", each.inputs["IN"].datatype, each.inputs["IN"].data * 2)]) for each in requests
        ]

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


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    loaded = await asyncio.to_thread(load_model, backend_of(Far), batching_config(), asyncio.get_running_loop())
    for value in range(100):  # until it is known to be quick
        await loaded.submit(request(value=value)).only()
    Far.journeys.clear()
    yield loaded
    await asyncio.to_thread(loaded.close)


async def test_batches_that_wait_travel_together_and_stay_batches(model: Model) -> None:
    before = model.statistics.snapshot().execution_count
    assert await _answers(model, range(12)) == [2.0 * value for value in range(12)]
    assert sum(map(len, Far.journeys)) >= 10
    assert {size for journey in Far.journeys for size in journey} == {1}
    assert model.statistics.snapshot().execution_count - before == 12


async def test_one_that_fails_leaves_its_companions_alone(model: Model) -> None:
    answers = await _answers(model, [1, 2, -1, 4, 5])
    assert answers == [2.0, 4.0, "minus one is not to my taste", 8.0, 10.0]


async def test_slow_batches_travel_alone(model: Model) -> None:
    Far.delay_s = 0.01
    try:
        await model.submit(request()).only()
        Far.journeys.clear()
        await _answers(model, range(6))
        assert Far.journeys == []
    finally:
        Far.delay_s = 0.0
