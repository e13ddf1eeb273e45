from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from support.batching import batching_config, load_model, request
from support.instances import Choosy, Doubling, Gated, backend_of
from support.leaks import no_leaks

from modelserver.backend import DeviceKind, InternalError
from modelserver.config.schema import (
    InstanceGroupKind,
    ModelDynamicBatching,
    ModelInstanceGroup,
)
from modelserver.errors import CancelledError, ConfigError, ErrorCode, ServerError, UnavailableError, UnsupportedError
from modelserver.execution.model import Model
from modelserver.telemetry.statistics_snapshot import FailureReason

DYNAMIC = ModelDynamicBatching()


@asynccontextmanager
async def served(make_instance: Callable[..., Any], config: Any = None, **attributes: Any) -> AsyncIterator[Model]:
    config = config or batching_config(dynamic_batching=DYNAMIC)
    fields = {key: attributes.pop(key) for key in ("default_max_queue_size",) if key in attributes}
    loop = asyncio.get_running_loop()
    model = await asyncio.to_thread(load_model, backend_of(make_instance, **attributes), config, loop, **fields)
    try:
        yield model
    finally:
        await asyncio.to_thread(model.close)


async def infer(model: Model, value: float = 1.0, **fields: Any) -> float:
    sent = request(value=value, **fields)
    response = await model.submit(sent).only()
    assert response.outputs[0].shape == sent.inputs["IN"].shape
    return float(response.outputs[0].data.flat[0])


@pytest.mark.parametrize("make_instance", [Doubling, Choosy])
@pytest.mark.parametrize("runs_inline", [False, True])
async def test_answers(make_instance: Callable[..., Any], runs_inline: bool) -> None:
    async with served(make_instance, runs_inline=runs_inline) as model:
        assert await asyncio.gather(*(infer(model, value) for value in range(20))) == [2 * v for v in range(20)]
        assert model.inflight == 0
        numbers = model.statistics.snapshot()
        assert numbers.success.count == numbers.queue.count == numbers.inference_count == 20
        assert numbers.execution_count < 20


async def test_rows_of_several_sizes_come_back_where_they_belong() -> None:
    async with served(Doubling) as model:
        sent = [request(rows, 3, value=rows) for rows in (1, 3, 2, 5, 8, 1)]
        responses = await asyncio.gather(*(model.submit(each).only() for each in sent))
        for each, response in zip(sent, responses, strict=True):
            np.testing.assert_array_equal(response.outputs[0].data, each.inputs["IN"].data * 2)


async def test_without_dynamic_batching_each_request_is_executed_alone() -> None:
    instance = Doubling()
    async with served(lambda _: instance, batching_config()) as model:
        await asyncio.gather(*(infer(model) for _ in range(5)))
        assert instance.batches == [1] * 5


async def test_a_lone_request_passes_its_array_uncopied() -> None:
    seen = []

    class Keeping(Doubling):
        def run(self, inputs: Any) -> Any:
            seen.append(inputs["IN"])
            return super().run(inputs)

    async with served(Keeping) as model:
        sent = request()
        await model.submit(sent).only()
        assert seen == [sent.inputs["IN"].data]
        assert seen[0] is sent.inputs["IN"].data


@pytest.mark.parametrize("position", range(5))
async def test_cancel_leaves_batchmates_alone(position: int) -> None:
    instance = Gated()
    async with served(lambda _: instance) as model:
        first = asyncio.create_task(infer(model))
        await asyncio.to_thread(instance.entered.wait, 10)
        sent = [request(value=value) for value in range(5)]
        streams = [model.submit(each) for each in sent]
        sent[position].cancel()
        with pytest.raises(CancelledError):
            await streams.pop(position).only()
        instance.gate.set()
        assert await first == 2
        values = [(await stream.only()).outputs[0].data.item() for stream in streams]
        assert values == [2 * value for value in range(5) if value != position]
        assert instance.batches == [1, 4]
        assert model.statistics.snapshot().failures[FailureReason.CANCELED] == 1


@pytest.mark.parametrize("position", range(5))
async def test_deadline_leaves_batchmates_alone_while_the_worker_is_busy(position: int) -> None:
    instance = Gated()
    async with served(lambda _: instance) as model:
        first = asyncio.create_task(infer(model))
        await asyncio.to_thread(instance.entered.wait, 10)
        sent = [request(value=value) for value in range(5)]
        sent[position].deadline_ns = model._engine._clock.now_ns() + 5_000_000
        streams = [model.submit(each) for each in sent]
        with pytest.raises(UnavailableError, match="Request timeout expired"):
            await streams.pop(position).only()
        instance.gate.set()
        await first
        values = [(await stream.only()).outputs[0].data.item() for stream in streams]
        assert values == [2 * value for value in range(5) if value != position]
        assert instance.batches == [1, 4]
        assert model.statistics.snapshot().failures[FailureReason.REJECTED] == 1


@pytest.mark.parametrize("position", range(5))
async def test_failure_leaves_batchmates_alone(position: int) -> None:
    async with served(Choosy) as model:
        streams = [model.submit(request(value=-1 if index == position else index)) for index in range(5)]
        with pytest.raises(ServerError, match="negative value -1"):
            await streams[position].only()
        for index, stream in enumerate(streams):
            if index != position:
                assert (await stream.only()).outputs[0].data.item() == 2 * index
        numbers = model.statistics.snapshot()
        assert numbers.success.count == numbers.queue.count == numbers.compute_infer.count == 4
        assert numbers.fail.count == numbers.failures[FailureReason.BACKEND] == 1


async def test_cancel_of_an_executing_request_is_answered_as_usual() -> None:
    instance = Gated()
    async with served(lambda _: instance) as model:
        sent = request()
        stream = model.submit(sent)
        await asyncio.to_thread(instance.entered.wait, 10)
        sent.cancel()
        instance.gate.set()
        assert (await stream.only()).error is None


async def test_an_exception_answers_the_whole_batch_and_the_worker_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    class Once(Doubling):
        def run(self, inputs: Any) -> Any:
            if not self.batches:
                self.batches.append(0)
                raise ZeroDivisionError("by accident")
            return super().run(inputs)

    async with served(Once) as model:
        streams = [model.submit(request()) for _ in range(3)]
        for stream in streams:
            with pytest.raises(InternalError, match=r"instance 'm_0_0' failed: ZeroDivisionError: by accident"):
                await stream.only()
        assert await infer(model) == 2
        assert model.statistics.snapshot().failures[FailureReason.BACKEND] == 3
    assert sum("by accident" in (record.exc_text or "") for record in caplog.records) == 1


async def test_a_model_that_exits_does_not_end_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    class Exiting(Doubling):
        def run(self, inputs: Any) -> Any:
            raise SystemExit(3)

    async with served(Exiting) as model:
        for _ in range(2):
            with pytest.raises(InternalError, match="SystemExit: 3"):
                await infer(model)


async def test_a_reader_that_fails_does_not_take_the_others_responses(caplog: pytest.LogCaptureFixture) -> None:
    instance = Gated()
    async with served(lambda _: instance) as model:
        stream = model.submit(request())
        await asyncio.to_thread(instance.entered.wait, 10)
        broken, whole = model.submit(request()), model.submit(request())
        broken.subscribe(lambda response: 1 / 0)
        instance.gate.set()
        await stream.only()
        assert (await whole.only()).error is None
        assert model.inflight == 0
    assert "the reader of a response failed" in caplog.text


async def test_stop_finishes_what_was_accepted_and_drain_waits_for_it() -> None:
    instance = Gated()
    async with served(lambda _: instance, batching_config(max_batch_size=1)) as model:
        streams = [model.submit(request(value=value)) for value in range(3)]
        model.stop()
        with pytest.raises(UnavailableError, match="has stopped accepting new inference requests"):
            model.submit(request())
        assert not await model.drain(0.01)
        instance.gate.set()
        assert await model.drain(10)
        assert all([(await stream.only()).error is None for stream in streams])


async def test_close_answers_what_is_queued() -> None:
    instance = Gated()
    async with served(lambda _: instance, batching_config(max_batch_size=1)) as model:
        executing = model.submit(request())
        await asyncio.to_thread(instance.entered.wait, 10)
        queued = model.submit(request())
        closing = asyncio.create_task(asyncio.to_thread(model.close))
        with pytest.raises(UnavailableError, match="unloaded before"):
            await queued.only()
        assert not instance.is_closed
        instance.gate.set()
        await closing
        assert (await executing.only()).error is None
        assert instance.is_closed
        assert model.inflight == 0


@pytest.mark.parametrize("runs_inline", [False, True])
async def test_closed_instances_are_gone_before_the_garbage_collector_comes(runs_inline: bool) -> None:
    """What a library keeps outside of Python's memory goes with them."""
    made: list[weakref.ref[Doubling]] = []

    def make(placement: Any) -> Doubling:
        instance = Doubling(placement)
        made.append(weakref.ref(instance))
        return instance

    gc.disable()
    try:
        async with served(make, batching_config(count=2), can_run_inline=runs_inline) as model:
            assert await infer(model) == 2
            await asyncio.to_thread(model.close)
            assert [instance() for instance in made] == [None, None]
    finally:
        gc.enable()


async def test_close_abandons_an_instance_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    instance = Gated()
    async with served(lambda _: instance) as model:
        stream = model.submit(request())
        await asyncio.to_thread(instance.entered.wait, 10)
        await asyncio.to_thread(model.close, 0.01)
        assert not instance.is_closed
        assert "still executes" in caplog.text
        instance.gate.set()
        await stream.only()


def test_responses_after_the_loop_is_gone_harm_nobody() -> None:
    instance = Gated()

    async def leave() -> Model:
        model = await asyncio.to_thread(
            load_model, backend_of(lambda _: instance), batching_config(), asyncio.get_running_loop()
        )
        model.submit(request())
        model.submit(request())
        await asyncio.to_thread(instance.entered.wait, 10)
        return model

    with no_leaks():
        model = asyncio.run(leave())
        instance.gate.set()
        model.close()
        assert instance.is_closed


async def test_the_servers_default_bounds_the_queue() -> None:
    instance = Gated()
    async with served(lambda _: instance, default_max_queue_size=2) as model:
        streams = [model.submit(request())]
        await asyncio.to_thread(instance.entered.wait, 10)
        streams += [model.submit(request()) for _ in range(2)]
        assert model.queue_depth == model.statistics.snapshot().pending == 2
        with pytest.raises(
            UnavailableError, match=r"Exceeds maximum queue size: .* 2 requests .*or raise --max-queue-size$"
        ):
            model.submit(request())
        instance.gate.set()
        await asyncio.gather(*(stream.only() for stream in streams))
        assert model.statistics.snapshot().failures[FailureReason.REJECTED] == 1


async def test_several_instances_execute_at_once_and_answers_keep_their_order() -> None:
    instances: list[Gated] = []

    def make(placement: Any) -> Gated:
        instances.append(Gated(placement))
        return instances[-1]

    config = batching_config(1, count=2, dynamic_batching=ModelDynamicBatching(preserve_ordering=True))
    async with served(make, config) as model:
        order: list[int] = []
        for value in range(2):
            model.submit(request(value=value)).subscribe(
                lambda response: order.append(int(response.outputs[0].data.item()))
            )
        for instance in instances:
            await asyncio.to_thread(instance.entered.wait, 10)
        assert [info.is_busy for info in model.instances()] == [True, True]
        instances[1].gate.set()
        await asyncio.to_thread(instances[1].left.wait, 10)
        instances[0].gate.set()
        assert await model.drain(10)
        assert order == [0, 2]


async def test_inline_execution_gives_the_loop_a_turn_between_batches() -> None:
    turns = 0

    class Slow(Doubling):
        def run(self, inputs: Any) -> Any:
            threading.Event().wait(0.002)
            return super().run(inputs)

    config = batching_config(max_batch_size=1, dynamic_batching=ModelDynamicBatching())
    async with served(Slow, config, runs_inline=True) as model:
        streams = [model.submit(request()) for _ in range(5)]
        while model.inflight:
            turns += 1
            await asyncio.sleep(0)
        assert turns >= 5
        await asyncio.gather(*(stream.only() for stream in streams))


# Full with two rows; one waits for an hour.
PATIENT = batching_config(
    max_batch_size=2, dynamic_batching=ModelDynamicBatching(max_queue_delay_microseconds=3_600_000_000)
)


async def test_inline_execution_honours_the_queue_delay() -> None:
    instance = Doubling()
    async with served(lambda _: instance, PATIENT, runs_inline=True) as model:
        first = asyncio.create_task(infer(model))
        await asyncio.sleep(0.001)
        await asyncio.gather(first, infer(model))
        assert instance.batches == [2]


async def test_worker_honours_the_queue_delay() -> None:
    instance = Doubling()
    async with served(lambda _: instance, PATIENT) as model:
        first = asyncio.create_task(infer(model))
        await asyncio.sleep(0.001)
        await asyncio.gather(first, infer(model))
        assert instance.batches == [2]


@pytest.mark.parametrize(
    ("group", "names", "kind"),
    [
        (ModelInstanceGroup("g", InstanceGroupKind.KIND_CPU, 2), ["g_0", "g_1"], DeviceKind.CPU),
        (ModelInstanceGroup("g", InstanceGroupKind.KIND_MODEL, 1), ["g_0"], DeviceKind.MODEL),
        (ModelInstanceGroup("g", InstanceGroupKind.KIND_GPU, 1, gpus=(0, 3)), ["g_0_0", "g_0_3"], DeviceKind.GPU),
    ],
)  # fmt: skip
async def test_instances_follow_the_groups(group: ModelInstanceGroup, names: list[str], kind: DeviceKind) -> None:
    async with served(Doubling, batching_config(instance_group=(group,))) as model:
        assert [info.name for info in model.instances()] == names
        assert {info.placement.kind for info in model.instances()} == {kind}
        assert model.is_ready()
        await infer(model)
        assert sum(info.executions for info in model.instances()) == 1


async def test_passive_instances_get_no_requests() -> None:
    groups = (
        ModelInstanceGroup("active", InstanceGroupKind.KIND_CPU, 1),
        ModelInstanceGroup("passive", InstanceGroupKind.KIND_CPU, 1, passive=True),
    )
    async with served(Doubling, batching_config(1, instance_group=groups)) as model:
        await asyncio.gather(*(infer(model) for _ in range(20)))
        assert [info.executions for info in model.instances()] == [20, 0]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"instance_group": (ModelInstanceGroup("g", InstanceGroupKind.KIND_GPU),)}, ConfigError, "no GPU is visible"),
        ({"instance_group": (ModelInstanceGroup("g", passive=True),)}, ConfigError, "is passive"),
    ],
)  # fmt: skip
async def test_configs_that_cannot_be_served(fields: Any, error: type[ServerError], message: str) -> None:
    with pytest.raises(error, match=message):
        async with served(Doubling, batching_config(**fields)):
            pass


@pytest.mark.parametrize("stage", ["__init__", "load", "create_instance"])
async def test_a_failed_load_frees_what_was_made(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    made: list[Doubling] = []
    unloaded: list[bool] = []
    lock = threading.Lock()

    def fail(*_: Any) -> Any:
        raise ValueError("no such thing")

    def make(placement: Any) -> Doubling:
        with lock:
            if stage == "create_instance" and len(made) == 2:
                fail()
            made.append(Doubling(placement))
            return made[-1]

    attributes: dict[str, Any] = {"unload": lambda self: unloaded.append(True)}
    if stage != "create_instance":
        attributes[stage] = fail
    with no_leaks(), pytest.raises(InternalError, match="ValueError: no such thing"):
        async with served(make, batching_config(count=3), **attributes):
            pass
    assert all(instance.is_closed for instance in made)
    assert unloaded == ([True] if stage == "create_instance" else [])


async def test_an_error_of_the_backend_is_the_reason_of_the_failed_load() -> None:
    def load(_: Any) -> None:
        raise UnsupportedError("opset 99 is too new")

    with pytest.raises(UnsupportedError, match="opset 99"):
        async with served(Doubling, load=load):
            pass


async def test_unready_instances_make_the_model_unready() -> None:
    class Moody(Doubling):
        def is_ready(self) -> bool:
            return False

    async with served(Moody) as model:
        assert not model.is_ready()


async def test_update_keeps_instances_that_stay_and_closes_those_that_go() -> None:
    made: list[Doubling] = []

    def make(placement: Any) -> Doubling:
        made.append(Doubling(placement))
        return made[-1]

    async with served(make, batching_config(count=2)) as model:
        kept = made[0]
        await asyncio.to_thread(model.update_instances, batching_config(count=3))
        assert [info.name for info in model.instances()] == ["m_0_0", "m_0_1", "m_0_2"]
        await asyncio.to_thread(model.update_instances, batching_config(count=1))
        assert [info.name for info in model.instances()] == ["m_0_0"]
        assert model.config.instance_group[0].count == 1
        assert [instance.is_closed for instance in made] == [False, True, True]
        assert await infer(model) == 2
        assert made[0] is kept


async def test_renaming_and_splitting_groups_keeps_instances_of_the_same_description() -> None:
    made: list[Doubling] = []

    def make(placement: Any) -> Doubling:
        made.append(Doubling(placement))
        return made[-1]

    def groups(*described: tuple[str, int, str]) -> Any:
        return batching_config(
            instance_group=tuple(
                ModelInstanceGroup(name, InstanceGroupKind.KIND_CPU, count=count, host_policy=policy)
                for name, count, policy in described
            )
        )

    async with served(make, groups(("one", 3, ""))) as model:
        await asyncio.to_thread(model.update_instances, groups(("other", 3, "")))
        await asyncio.to_thread(model.update_instances, groups(("a", 1, ""), ("b", 2, "")))
        assert len(made) == 3
        assert not any(instance.is_closed for instance in made)
        assert [info.name for info in model.instances()] == ["one_0", "one_1", "one_2"], "they keep their names"
        await asyncio.to_thread(model.update_instances, groups(("a", 2, ""), ("b", 1, "elsewhere")))
        assert [instance.is_closed for instance in made] == [False, False, True, False]
        assert [info.name for info in model.instances()] == ["one_0", "one_1", "b_0"]
        await asyncio.to_thread(model.update_instances, groups(("a", 4, "")))
        assert [instance.is_closed for instance in made] == [False, False, True, True, False, False]
        assert await infer(model) == 2


async def test_a_failed_update_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Doubling] = []

    def make(placement: Any) -> Doubling:
        if made:
            raise MemoryError("no room")
        made.append(Doubling(placement))
        return made[-1]

    async with served(make) as model:
        before = model.config
        with pytest.raises(InternalError, match="no room"):
            await asyncio.to_thread(model.update_instances, batching_config(count=3))
        assert model.config is before
        assert await infer(model) == 2


async def test_update_after_close_is_refused() -> None:
    async with served(Doubling) as model:
        await asyncio.to_thread(model.close)
        with pytest.raises(UnavailableError, match="is unloaded"):
            await asyncio.to_thread(model.update_instances, batching_config(count=3))


async def test_an_unknown_kind_of_answer_fails_only_its_request() -> None:
    class Odd(Choosy):
        def execute(self, requests: Any) -> Any:
            return [ErrorCode.UNKNOWN for _ in requests]

    async with served(Odd) as model:
        with pytest.raises(InternalError, match="expected an InferResponse or a ServerError"):
            await infer(model)


async def test_load_leaves_nothing_behind() -> None:
    with no_leaks():
        async with served(Doubling, batching_config(count=3)) as model:
            await infer(model)
