"""Every accepted request is answered exactly once, whatever happens to it and to its instances meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from support.batching import batching_config, load_model, request
from support.instances import Choosy, backend_of
from support.integrity import check_integrity
from support.leaks import no_leaks

from modelserver.config.schema import ModelDynamicBatching, ModelQueuePolicy, TimeoutAction
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import ErrorCode, ServerError
from modelserver.execution.model import Model
from modelserver.scheduling.batcher import Batcher

SCHEDULES = {
    "single": None,
    "plain": ModelDynamicBatching(),
    "delay": ModelDynamicBatching(max_queue_delay_microseconds=300, preferred_batch_size=(4,)),
    "ordered": ModelDynamicBatching(preserve_ordering=True, max_queue_delay_microseconds=200),
    "levels": ModelDynamicBatching(
        priority_levels=3,
        default_priority_level=2,
        default_queue_policy=ModelQueuePolicy(
            timeout_action=TimeoutAction.DELAY,
            default_timeout_microseconds=200,
            allow_timeout_override=True,
            max_queue_size=50,
        ),
    ),
}


class Erratic(Choosy):
    """Takes a random moment, fails requests with a negative value, and whole batches now and then."""

    def __init__(self, placement: Any) -> None:
        super().__init__(placement)
        self.random = random.Random(placement.index)

    def execute(self, requests: Sequence[InFlightRequest]) -> list[InferResponse | ServerError]:
        if self.random.random() < 0.3:
            threading.Event().wait(self.random.random() / 2000)
        if self.random.random() < 0.05:
            raise ServerError("the whole batch failed")
        return super().execute(requests)


class Crowd:
    """Submits requests at random, cancels some, and counts the answers of each."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model = model
        self.random = random.Random(seed)
        self.num_refused = 0
        self.answers: dict[InFlightRequest, list[InferResponse]] = {}

    async def send(self, num_requests: int) -> None:
        for _ in range(num_requests):
            sent = self._make()
            try:
                stream = self.model.submit(sent)
            except ServerError:
                self.num_refused += 1
                continue
            answers = self.answers[sent] = []
            stream.subscribe(answers.append)
            if self.random.random() < 0.2:
                asyncio.get_running_loop().call_later(self.random.random() / 1000, sent.cancel)
            if self.random.random() < 0.3:
                await asyncio.sleep(self.random.random() / 2000)

    def _make(self) -> InFlightRequest:
        chance = self.random.random
        sent = request(
            self.random.randint(1, 4),
            self.random.randint(1, 2),
            value=-1 if chance() < 0.1 else 1,
            priority=self.random.randint(0, 4),
            timeout_us=self.random.randint(1, 1000) if chance() < 0.3 else 0,
        )
        if chance() < 0.2:
            sent.deadline_ns = time.monotonic_ns() + self.random.randint(-10_000, 1_000_000)
        return sent

    def check(self) -> None:
        """One final answer each; the statistics tell the same story."""
        assert all(len(answers) == 1 for answers in self.answers.values())
        errors = [answers[0].error for answers in self.answers.values()]
        assert {error.code for error in errors if error is not None} <= {
            ErrorCode.CANCELLED, ErrorCode.UNAVAILABLE, ErrorCode.INVALID_ARGUMENT, ErrorCode.UNKNOWN,
        }  # fmt: skip
        numbers = self.model.statistics.snapshot()
        assert numbers.success.count == errors.count(None) > 0
        assert numbers.fail.count == len(errors) - errors.count(None) + self.num_refused
        assert numbers.queue.count == numbers.compute_infer.count == numbers.success.count
        assert numbers.fail.count == sum(numbers.failures.values())
        assert numbers.inference_count == sum(
            rows * stat.compute_infer.count for rows, stat in numbers.batch_stats.items()
        )
        # Batches of which every request failed are executions too, and in no statistics of batches.
        assert numbers.execution_count >= sum(stat.compute_infer.count for stat in numbers.batch_stats.values())
        assert self.model.queue_depth == self.model.inflight == 0


async def _change_instances(model: Model, config: Any, stop: asyncio.Event, seed: int) -> None:
    chance = random.Random(seed)
    while not stop.is_set():
        group = config.instance_group[0]
        changed = batching_config(count=chance.randint(1, 4), dynamic_batching=config.dynamic_batching)
        assert changed.instance_group[0].name == group.name
        await asyncio.to_thread(model.update_instances, changed)
        await asyncio.sleep(0.001)


def _check_integrity(model: Model) -> None:
    if isinstance(model._engine.scheduler, Batcher):  # the other kind has nothing to hold
        check_integrity(model._engine.scheduler)


@pytest.mark.stress
@pytest.mark.parametrize("runs_inline", [False, True], ids=["threads", "inline"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
async def test_exactly_one_answer(schedule: str, runs_inline: bool, seed: int) -> None:
    config = batching_config(count=3, dynamic_batching=SCHEDULES[schedule])
    with no_leaks():
        backend = backend_of(Erratic, runs_inline=runs_inline)
        model = await asyncio.to_thread(load_model, backend, config, asyncio.get_running_loop())
        crowd = Crowd(model, seed)
        stop = asyncio.Event()
        changing = asyncio.create_task(_change_instances(model, config, stop, seed))
        await crowd.send(400)
        stop.set()
        await changing
        _check_integrity(model)
        assert await model.drain(10)
        _check_integrity(model)
        await asyncio.to_thread(model.close)
    crowd.check()


@pytest.mark.stress
async def test_close_under_traffic_answers_everything() -> None:
    for seed in range(10):
        config = batching_config(count=2, dynamic_batching=SCHEDULES["delay"])
        model = await asyncio.to_thread(load_model, backend_of(Erratic), config, asyncio.get_running_loop())
        crowd = Crowd(model, seed)
        sending = asyncio.create_task(crowd.send(200))
        while not any(each and each[0].error is None for each in crowd.answers.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.to_thread(model.close)
        await sending
        assert await model.drain(10)
        crowd.check()


@pytest.mark.stress
async def test_no_request_is_lost_while_instances_come_and_go() -> None:
    config = batching_config(count=1, dynamic_batching=ModelDynamicBatching())
    model = await asyncio.to_thread(load_model, backend_of(Choosy), config, asyncio.get_running_loop())
    stop = asyncio.Event()
    num_answers = 0

    async def client() -> None:
        nonlocal num_answers
        while not stop.is_set():
            assert (await model.submit(request()).only()).error is None
            num_answers += 1

    clients = [asyncio.create_task(client()) for _ in range(8)]
    for count in [3, 1, 4, 2, 1] * 6:
        await asyncio.to_thread(
            model.update_instances, batching_config(count=count, dynamic_batching=config.dynamic_batching)
        )
    stop.set()
    await asyncio.gather(*clients)
    assert num_answers == model.statistics.snapshot().success.count > 8
    await asyncio.to_thread(model.close)
