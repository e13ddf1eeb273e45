"""Instances that go in steps: requests join and leave between steps, and each ends exactly once."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.batching import batching_config, load_model, request
from support.gate import until
from support.instances import backend_of
from support.stepping import Counting, numbers

from modelserver.backend import InferRequest, InferResponse, Placement, Tensor
from modelserver.config.schema import (
    ModelDynamicBatching,
    ModelSequenceBatching,
    ModelTransactionPolicy,
    ModelWarmup,
    WarmupInput,
)
from modelserver.core.datatype import Datatype
from modelserver.core.response import ResponseStream
from modelserver.errors import CancelledError, ConfigError, InternalError, ServerError, UnavailableError
from modelserver.execution.model import Model
from modelserver.telemetry.statistics_snapshot import FailureReason

DECOUPLED = ModelTransactionPolicy(decoupled=True)


class Loaded:
    def __init__(self, model: Model, instances: list[Counting]) -> None:
        self.model = model
        self.instances = instances

    @property
    def instance(self) -> Counting:
        return self.instances[0]

    def submit(self, end: float) -> tuple[InferRequest, ResponseStream]:
        made = request(value=end)
        made.is_decoupled = True
        return made, self.model.submit(made)


Load = Callable[..., Awaitable[Loaded]]


@pytest.fixture
async def load() -> AsyncIterator[Load]:
    loaded: list[Loaded] = []

    async def make(count: int = 1, most: int = 1000, **fields: Any) -> Loaded:
        instances: list[Counting] = []

        def create(placement: Placement) -> Counting:
            instances.append(Counting(placement, most=most))
            return instances[-1]

        config = batching_config(count=count, model_transaction_policy=DECOUPLED, **fields)
        model = await asyncio.to_thread(load_model, backend_of(create), config, asyncio.get_running_loop())
        loaded.append(Loaded(model, instances))
        return loaded[-1]

    yield make
    for each in loaded:
        for instance in each.instances:
            instance.may_step.set()
        each.model.stop()
        await asyncio.to_thread(each.model.close, 5)


async def test_a_request_is_answered_step_by_step(load: Load) -> None:
    loaded = await load()
    _, stream = loaded.submit(3)
    assert await numbers(stream) == [1, 2, 3]
    assert loaded.instance.num_steps == 4


async def test_requests_that_come_later_join_those_at_hand(load: Load) -> None:
    loaded = await load()
    instance = loaded.instance
    instance.may_step.clear()
    streams = [loaded.submit(5)[1]]
    await until(lambda: len(instance.counts) == 1, "the first is taken on")
    streams += [loaded.submit(end)[1] for end in (1, 2, 7)]
    instance.may_step.set()
    answers = await asyncio.gather(*map(numbers, streams))
    assert answers == [[*range(1, end + 1)] for end in (5, 1, 2, 7)]
    assert instance.most_at_once == 4


async def test_batches_of_a_dynamic_batcher_are_taken_on_too(load: Load) -> None:
    loaded = await load(dynamic_batching=ModelDynamicBatching(max_queue_delay_microseconds=1000))
    streams = [loaded.submit(end)[1] for end in (4, 4, 2)]
    assert await asyncio.gather(*map(numbers, streams)) == [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2]]


async def test_what_has_no_room_waits_in_the_queue(load: Load) -> None:
    loaded = await load(most=2)
    instance = loaded.instance
    instance.may_step.clear()
    streams = [loaded.submit(2)[1] for _ in range(5)]
    await until(lambda: len(instance.counts) == 2, "two are taken on")
    assert loaded.model.queue_depth == 3
    instance.may_step.set()
    assert await asyncio.gather(*map(numbers, streams)) == [[1, 2]] * 5
    assert instance.most_at_once == 2


async def test_instances_share_the_queue(load: Load) -> None:
    loaded = await load(count=2, most=1)
    for instance in loaded.instances:
        instance.may_step.clear()
    streams = [loaded.submit(2)[1] for _ in range(2)]
    await until(lambda: all(len(instance.counts) == 1 for instance in loaded.instances), "each has one")
    for instance in loaded.instances:
        instance.may_step.set()
    assert await asyncio.gather(*map(numbers, streams)) == [[1, 2]] * 2


async def test_a_refused_request_disturbs_no_other(load: Load) -> None:
    loaded = await load()
    loaded.instance.may_step.clear()
    _, good = loaded.submit(2)
    _, bad = loaded.submit(-1)
    loaded.instance.may_step.set()
    with pytest.raises(ServerError, match="cannot count to -1"):
        await numbers(bad)
    assert await numbers(good) == [1, 2]


async def test_a_cancelled_request_is_aborted_before_the_next_step(load: Load) -> None:
    loaded = await load()
    instance = loaded.instance
    instance.may_step.clear()
    left, gone = loaded.submit(500_000)
    _, stays = loaded.submit(3)
    await until(lambda: instance.most_at_once == 2, "both are taken on")
    left.cancel()
    instance.may_step.set()
    with pytest.raises(CancelledError):
        await numbers(gone)
    assert instance.aborted == [left]
    assert await numbers(stays) == [1, 2, 3]
    snapshot = loaded.model.statistics.snapshot()
    assert snapshot.failures[FailureReason.CANCELED] == 1
    assert loaded.model.inflight == 0


async def test_a_cancel_reaches_an_instance_that_sleeps(load: Load) -> None:
    class Waiting(Counting):
        has_work = property(lambda self: False)  # type: ignore[assignment]

    instances: list[Waiting] = []
    backend = backend_of(lambda placement: instances.append(Waiting(placement)) or instances[-1])
    config = batching_config(model_transaction_policy=DECOUPLED)
    model = await asyncio.to_thread(load_model, backend, config, asyncio.get_running_loop())
    left = request(value=1)
    stream = model.submit(left)
    await until(lambda: len(instances[0].counts) == 1, "taken on")
    left.cancel()
    with pytest.raises(CancelledError):
        await numbers(stream)
    assert instances[0].aborted == [left]
    model.stop()
    await asyncio.to_thread(model.close, 5)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("no memory"), "RuntimeError: no memory"),
        (UnavailableError("the device is gone"), "the device is gone"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
async def test_a_failed_step_fails_what_is_at_hand_and_the_instance_goes_on(
    load: Load, error: BaseException, expected: str
) -> None:
    loaded = await load()
    instance = loaded.instance
    instance.may_step.clear()
    requests, streams = zip(*[loaded.submit(4) for _ in range(3)], strict=True)
    await until(lambda: instance.most_at_once > 0, "one is taken on")
    instance.error = error
    instance.may_step.set()
    results = await asyncio.gather(*map(numbers, streams), return_exceptions=True)
    failed = [result for result in results if isinstance(result, ServerError)]
    assert failed
    assert all(expected in failure.message for failure in failed)
    assert set(instance.aborted) <= set(requests)
    assert len(instance.aborted) == len(failed)
    assert await numbers(loaded.submit(2)[1]) == [1, 2]
    assert loaded.model.is_ready()


@pytest.mark.parametrize("how", ["stuck", "abort"])
async def test_an_instance_that_cannot_let_go_is_out_of_order(load: Load, how: str) -> None:
    loaded = await load()
    instance = loaded.instance
    instance.may_step.clear()
    _, stream = loaded.submit(4)
    await until(lambda: len(instance.counts) == 1, "taken on")
    instance.error = RuntimeError("broken")
    instance.is_stuck = how == "stuck"
    instance.abort_error = RuntimeError("cannot") if how == "abort" else None
    instance.may_step.set()
    with pytest.raises(InternalError, match="broken"):
        await numbers(stream)
    assert not loaded.model.is_ready()
    num_steps = instance.num_steps
    with pytest.raises(UnavailableError, match="out of order"):
        await numbers(loaded.submit(1)[1])
    assert instance.num_steps == num_steps


async def test_unloading_finishes_what_was_accepted(load: Load) -> None:
    loaded = await load()
    loaded.instance.may_step.clear()
    streams = [loaded.submit(3)[1] for _ in range(3)]
    await until(lambda: loaded.instance.most_at_once > 0, "taken on")
    loaded.model.stop()
    with pytest.raises(UnavailableError):
        loaded.submit(1)
    loaded.instance.may_step.set()
    assert await loaded.model.drain(10)
    await asyncio.to_thread(loaded.model.close)
    assert await asyncio.gather(*map(numbers, streams)) == [[1, 2, 3]] * 3
    assert loaded.instance.is_closed


async def test_an_unloaded_instance_is_gone_before_the_garbage_collector_comes(load: Load) -> None:
    """And its weights with it."""
    gc.disable()
    try:
        loaded = await load()
        for end in (2, 3):
            _, stream = loaded.submit(end)
            assert await numbers(stream) == list(range(1, end + 1))
            del stream, _
        instance = weakref.ref(loaded.instance)
        loaded.model.stop()
        await asyncio.to_thread(loaded.model.close)
        loaded.instances.clear()
        assert instance() is None
    finally:
        gc.enable()


async def test_closing_ends_what_is_not_finished_in_time(load: Load) -> None:
    loaded = await load()
    _, stream = loaded.submit(1e9)
    await until(lambda: loaded.instance.num_steps > 3, "it counts")
    loaded.model.stop()
    await asyncio.to_thread(loaded.model.close, 0.05)
    with pytest.raises(UnavailableError, match="unloaded before the request was finished"):
        await numbers(stream)
    assert loaded.instance.is_closed


async def test_each_request_is_counted_once_with_its_times(load: Load) -> None:
    loaded = await load()
    await asyncio.gather(*(numbers(loaded.submit(end)[1]) for end in (3, 5)))
    await asyncio.gather(numbers(loaded.submit(-1)[1]), return_exceptions=True)
    await until(lambda: loaded.model.statistics.snapshot().fail.count == 1, "the refusal is counted")
    snapshot = loaded.model.statistics.snapshot()
    assert (snapshot.success.count, snapshot.inference_count, snapshot.execution_count) == (2, 2, 2)
    assert snapshot.success.ns >= snapshot.queue.ns + snapshot.compute_infer.ns > 0
    assert snapshot.response_stats[0].success.count == 2
    assert snapshot.failures[FailureReason.BACKEND] == 1


async def test_a_model_that_is_not_decoupled_answers_once(load: Load) -> None:
    class Echoing(Counting):
        def step(self) -> None:
            for made, count in self.counts.items():
                count.sender.finish(InferResponse([Tensor("OUT", Datatype.FP32, made.inputs["IN"].data)]))
            self.counts.clear()

    config = batching_config()
    model = await asyncio.to_thread(load_model, backend_of(Echoing), config, asyncio.get_running_loop())
    stream = model.submit(request(value=7))
    assert (await stream.only()).outputs[0].data.item() == 7
    model.stop()
    await asyncio.to_thread(model.close, 5)


async def test_warmup_steps_to_the_end(load: Load) -> None:
    sample = ModelWarmup(
        name="zeros", batch_size=1, inputs={"IN": WarmupInput(data_type=Datatype.FP32, dims=(1,), zero_data=True)}
    )
    loaded = await load(model_warmup=(sample,))
    assert loaded.instance.num_steps == 1
    assert not loaded.instance.counts


async def test_sequences_do_not_go_with_steps(load: Load) -> None:
    with pytest.raises(ConfigError, match="sequence_batching"):
        await load(sequence_batching=ModelSequenceBatching())


async def test_a_worker_without_work_sleeps(load: Load) -> None:
    loaded = await load()
    assert await numbers(loaded.submit(1)[1]) == [1]
    workers = [thread for thread in threading.enumerate() if thread.name.startswith(f"{loaded.model.name}/")]
    assert len(workers) == 1
    num_steps = loaded.instance.num_steps
    await asyncio.sleep(0.05)
    assert loaded.instance.num_steps == num_steps
