"""Which models are executed on the event loop, and how they leave it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.batching import batching_config, load_model, request
from support.instances import Choosy, Doubling, backend_of
from support.leaks import no_leaks
from support.repositories import infer, open_repository, write_model

from modelserver.backend import Array, InvalidArgumentError, Placement
from modelserver.config.schema import (
    InstanceGroupKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInstanceGroup,
    ModelWarmup,
    WarmupInput,
)
from modelserver.core.clock import Clock
from modelserver.core.datatype import Datatype
from modelserver.errors import ConfigError, InternalError, ServerError, UnavailableError
from modelserver.execution.inline import InlineGuard
from modelserver.execution.model import Model
from tests.support.manual_clock import ManualClock

DYNAMIC = ModelDynamicBatching()
BATCHING = pytest.mark.parametrize("batching", [None, DYNAMIC], ids=["direct", "batcher"])


class Moody(Doubling):
    """Doubles, notes the thread of each execution, and takes `delay_s` for it; what it is given below 0 fails."""

    threads: set[int]
    delay_s = 0.0

    def __init__(self, placement: Placement | None = None) -> None:
        super().__init__(placement)
        self.threads = set()
        self.num_at_once = 0

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.num_at_once += 1
        assert self.num_at_once == 1, "two threads at once"
        self.threads.add(threading.get_ident())
        if self.delay_s:
            threading.Event().wait(self.delay_s)
        self.num_at_once -= 1
        if (inputs["IN"] < 0).any():
            raise InvalidArgumentError("below zero")
        return super().run(inputs)


def _config(word: str | None, *, batching: ModelDynamicBatching | None = None, **fields: Any) -> ModelConfig:
    parameters = {} if word is None else {"inline_execution": word}
    return batching_config(parameters=parameters, dynamic_batching=batching, **fields)


class StartingClock:
    """Stands still until it is started: what is measured before took no time, however busy the machine is."""

    is_started = False

    def now_ns(self) -> int:
        return time.monotonic_ns() if self.is_started else 0


@asynccontextmanager
async def _served(
    make: Callable[..., Any], config: ModelConfig, *, clock: Clock | None = None, **attributes: Any
) -> AsyncIterator[Model]:
    """Without a `clock`, the machine's, but for the load."""
    loop, own = asyncio.get_running_loop(), StartingClock()
    with no_leaks():
        model = await asyncio.to_thread(load_model, backend_of(make, **attributes), config, loop, clock=clock or own)
        own.is_started = True
        try:
            yield model
        finally:
            await asyncio.to_thread(model.close)


def _is_inline(model: Model) -> bool:
    kinds = {info.is_inline for info in model.instances()}
    assert len(kinds) == 1, "some are executed here and some there"
    return kinds.pop()


async def _left(model: Model) -> None:
    """Wait until the model has left the event loop."""
    async with asyncio.timeout(60):
        while _is_inline(model):  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.005)


async def _double(model: Model, *values: float) -> list[float | str]:
    """The answers to requests that are submitted at once; an error's text for one that fails."""
    streams = [model.submit(request(value=value)) for value in values]
    answers: list[float | str] = []
    for stream in streams:
        try:
            answers.append(float((await asyncio.wait_for(stream.only(), 60)).outputs[0].data.flat[0]))
        except ServerError as error:
            answers.append(error.message)
    return answers


@BATCHING
@pytest.mark.parametrize(
    ("word", "attributes", "is_inline"),
    [
        (None, {}, False),
        (None, {"can_run_inline": True}, False),
        (None, {"runs_inline": True}, True),
        ("never", {"runs_inline": True}, False),
        ("always", {"can_run_inline": True}, True),
        ("always", {"runs_inline": True}, True),
        ("auto", {"can_run_inline": True}, True),
        ("auto", {}, False),
    ],
)
async def test_who_runs_on_the_event_loop(
    word: str | None, attributes: dict[str, bool], is_inline: bool, batching: ModelDynamicBatching | None
) -> None:
    instance = Moody()
    async with _served(lambda _: instance, _config(word, batching=batching), **attributes) as model:
        instance.threads.clear()
        assert _is_inline(model) is is_inline
        assert await _double(model, 1, 2, 3) == [2, 4, 6]
        assert (threading.get_ident() in instance.threads) is is_inline
        assert len(instance.threads) == 1


async def test_a_backend_that_cannot_is_not_forced() -> None:
    made: list[Doubling] = []

    def make(placement: Placement) -> Doubling:
        made.append(Doubling(placement))
        return made[-1]

    with pytest.raises(ConfigError, match="inline_execution: the backend 'test' cannot be called on the event loop"):
        async with _served(make, _config("always")):
            pass
    assert [instance.is_closed for instance in made] == [True]


class Timed(Doubling):
    """Takes time by a clock that otherwise stands still."""

    def __init__(self, clock: ManualClock, duration_us: int) -> None:
        super().__init__()
        self.clock = clock
        self.duration_us = duration_us

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        self.clock.advance_us(self.duration_us)
        return super().run(inputs)


@pytest.mark.parametrize(
    ("duration_us", "fields", "reason"),
    [
        (0, {}, None),
        (200, {}, None),
        (201, {}, "95 % of 40 executions took up to 201 us, the budget is 200 us"),
        (10_000, {}, "95 % of 40 executions took up to 10000 us, the budget is 200 us"),
        (
            0,
            {"instance_group": (ModelInstanceGroup("g", InstanceGroupKind.KIND_GPU, 1, gpus=(0,)),)},
            "instance 'g_0_0' is not on a CPU",
        ),
        (
            0,
            {"instance_group": (ModelInstanceGroup("g", InstanceGroupKind.KIND_MODEL, 1),)},
            "instance 'g_0' is not on a CPU",
        ),
    ],
)
async def test_auto_measures_and_says_what_it_found(
    duration_us: int, fields: dict[str, Any], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    with caplog.at_level(logging.INFO, "modelserver.execution.inline"):
        async with _served(
            lambda _: Timed(clock, duration_us), _config("auto", **fields), clock=clock, can_run_inline=True
        ) as model:
            assert _is_inline(model) is (reason is None)
    [line] = [record.getMessage() for record in caplog.records if record.name == "modelserver.execution.inline"]
    if reason is None:
        assert line.startswith("model 'm' version 1 is executed on the event loop: 95 % of 40 executions took up to")
    else:
        assert line.startswith("model 'm' version 1 is executed by worker threads: ")
        assert reason in line


async def test_auto_measures_batch_instances_too() -> None:
    async with _served(Choosy, _config("auto"), clock=ManualClock(), can_run_inline=True) as model:
        assert _is_inline(model)


async def test_auto_counts_executions_in_no_statistics() -> None:
    async with _served(Moody, _config("auto"), can_run_inline=True) as model:
        assert model.statistics.snapshot().execution_count == 0
        assert await _double(model, 1) == [2]
        assert model.statistics.snapshot().execution_count == 1


async def test_a_model_that_fails_when_it_is_measured_stays_with_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(Doubling):
        def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            if not inputs["IN"].any():
                raise InternalError("nothing but zeros")
            return super().run(inputs)

    with caplog.at_level(logging.INFO, "modelserver.execution.inline"):
        async with _served(Picky, _config("auto"), can_run_inline=True) as model:
            assert not _is_inline(model)
            assert await _double(model, 1) == [2]
    assert "failed when it was measured: nothing but zeros" in caplog.text


async def test_auto_measures_with_the_warmup_samples() -> None:
    clock = ManualClock()

    class SlowWhenWide(Doubling):
        def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
            if inputs["IN"].shape == (4, 100):
                clock.advance_us(1000)
            return super().run(inputs)

    def sample(rows: int, width: int) -> ModelWarmup:
        return ModelWarmup(f"{rows}", rows, {"IN": WarmupInput(Datatype.FP32, dims=(width,), zero_data=True)})

    for warmup, is_inline in (((), True), ((sample(1, 1),), True), ((sample(1, 1), sample(4, 100)), False)):
        config = _config("auto", model_warmup=warmup)
        async with _served(SlowWhenWide, config, clock=clock, can_run_inline=True) as model:
            assert _is_inline(model) is is_inline


@BATCHING
@pytest.mark.parametrize("word", ["auto", None])
async def test_a_model_that_turns_slow_leaves_the_event_loop(
    batching: ModelDynamicBatching | None, word: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    instance = Moody()
    attributes = {"can_run_inline": True} if word else {"runs_inline": True}
    config = _config(word, batching=batching, max_batch_size=1)
    async with _served(lambda _: instance, config, **attributes) as model:
        assert _is_inline(model)
        instance.delay_s = 0.002
        for value in range(4):
            assert _is_inline(model)
            assert await _double(model, value) == [2 * value]
        assert not _is_inline(model)
        instance.threads.clear()
        instance.delay_s = 0
        values = list(range(20))
        assert await _double(model, *values) == [2 * value for value in values]
        assert threading.get_ident() not in instance.threads
        assert [info.executions for info in model.instances()] == [24]
        numbers = model.statistics.snapshot()
        assert (numbers.success.count, numbers.inflight, numbers.pending) == (24, 0, 0)
        assert await model.drain(1)
    moved = [record for record in caplog.records if "from now on" in record.getMessage()]
    assert len(moved) == 1
    assert "model 'm' version 1 is executed by worker threads" in moved[0].getMessage()


async def test_what_is_queued_when_the_model_leaves_is_answered_in_order() -> None:
    instance = Moody()
    answered: list[int] = []
    config = _config("auto", batching=ModelDynamicBatching(preserve_ordering=True), max_batch_size=2)
    async with _served(lambda _: instance, config, can_run_inline=True) as model:
        instance.delay_s = 0.001
        streams = [model.submit(request(value=value)) for value in range(40)]
        for number, stream in enumerate(streams):
            stream.subscribe(lambda _, number=number: answered.append(number))
        assert await model.drain(10)
        assert not _is_inline(model)
        assert answered == list(range(40))
        assert len(instance.threads) == 3  # measured, on the loop, and by the worker


@BATCHING
async def test_failures_stay_their_own_and_slow_ones_count(batching: ModelDynamicBatching | None) -> None:
    instance = Moody()
    config = _config("always", batching=batching, max_batch_size=1)
    async with _served(lambda _: instance, config, can_run_inline=True) as model:
        assert await _double(model, 1, -1, 2) == [2, "below zero", 4]
        assert _is_inline(model)
    instance = Moody()
    config = _config("auto", batching=batching, max_batch_size=1)
    async with _served(lambda _: instance, config, can_run_inline=True) as model:
        instance.delay_s = 0.002
        for _ in range(4):
            assert await _double(model, -1) == ["below zero"]
        assert not _is_inline(model)
        assert await _double(model, 1, -1) == [2, "below zero"]


async def test_a_client_that_leaves_while_the_model_moves_is_cancelled() -> None:
    instance = Moody()
    config = _config("auto", batching=DYNAMIC, max_batch_size=1)
    async with _served(lambda _: instance, config, can_run_inline=True) as model:
        instance.delay_s = 0.002
        requests = [request(value=value) for value in range(12)]
        streams = [model.submit(each) for each in requests]
        for _ in range(1000):
            if _is_inline(model):
                await asyncio.sleep(0)
        requests[-1].cancel()
        results = await asyncio.gather(*(stream.only() for stream in streams), return_exceptions=True)
        assert [isinstance(result, ServerError) for result in results] == [False] * 11 + [True]


@BATCHING
async def test_a_config_that_demands_it_gets_a_warning_once(
    batching: ModelDynamicBatching | None, caplog: pytest.LogCaptureFixture
) -> None:
    instance = Moody()
    config = _config("always", batching=batching, max_batch_size=1)
    async with _served(lambda _: instance, config, can_run_inline=True) as model:
        instance.delay_s = 0.002
        for value in range(8):
            assert await _double(model, value) == [2 * value]
        assert _is_inline(model)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "as its config allows" in warnings[0]


@BATCHING
async def test_instances_may_change_in_place(batching: ModelDynamicBatching | None) -> None:
    config = _config("auto", batching=batching)
    # The clock stands still: new instances are measured, and on a busy machine they would be too slow.
    async with _served(Moody, config, clock=StartingClock(), can_run_inline=True) as model:
        for count in (3, 1):
            group = (ModelInstanceGroup("m_0", InstanceGroupKind.KIND_CPU, count),)
            await asyncio.to_thread(model.update_instances, replace(config, instance_group=group))
            assert _is_inline(model)
            assert len(model.instances()) == count
            assert await _double(model, 1, 2, 3) == [2, 4, 6]


@BATCHING
async def test_a_new_instance_that_is_slow_takes_the_model_off_the_event_loop(
    batching: ModelDynamicBatching | None,
) -> None:
    made: list[Moody] = []

    def make(placement: Placement) -> Moody:
        instance = Moody(placement)
        instance.delay_s = 0.001 if made else 0.0
        made.append(instance)
        return instance

    config = _config("auto", batching=batching)
    async with _served(make, config, can_run_inline=True) as model:
        assert _is_inline(model)
        group = (ModelInstanceGroup("m_0", InstanceGroupKind.KIND_CPU, 2),)
        await asyncio.to_thread(model.update_instances, replace(config, instance_group=group))
        await _left(model)
        assert await _double(model, *range(10)) == [2 * value for value in range(10)]
        group = (ModelInstanceGroup("m_0", InstanceGroupKind.KIND_CPU, 1),)
        await asyncio.to_thread(model.update_instances, replace(config, instance_group=group))
        assert not _is_inline(model)  # it does not come back before it is loaded again
        assert await _double(model, 5) == [10]


async def test_a_passive_instance_is_not_measured() -> None:
    class Idle(Moody):
        def __init__(self, placement: Placement) -> None:
            super().__init__(placement)
            self.delay_s = 0.01 if placement.name.startswith("spare") else 0.0

    groups = (
        ModelInstanceGroup("m_0", InstanceGroupKind.KIND_CPU, 1),
        ModelInstanceGroup("spare", InstanceGroupKind.KIND_CPU, 1, passive=True),
    )
    async with _served(Idle, _config("auto", instance_group=groups), can_run_inline=True) as model:
        assert [info.is_inline for info in model.instances()] == [True, False]


async def test_a_stopped_model_stays_where_it_is() -> None:
    async with _served(Moody, _config("auto"), can_run_inline=True) as model:
        model.stop()
        model._engine.leave_loop()
        assert _is_inline(model)
        with pytest.raises(UnavailableError, match="being unloaded"):
            model.submit(request())


async def test_while_instances_change_a_slow_model_waits_for_its_turn() -> None:
    instance = Moody()
    async with _served(lambda _: instance, _config("auto"), can_run_inline=True) as model:
        instance.delay_s = 0.002
        with model._engine.lock:
            assert await _double(model, 1, 2, 3, 4) == [2, 4, 6, 8]
            assert _is_inline(model)
        await _left(model)
        assert await _double(model, 1, 2) == [2, 4]


async def test_a_reload_begins_anew(tmp_path: Path) -> None:
    write_model(tmp_path, "m", extra='parameters { key: "inline_execution" value { string_value: "never" } }')
    async with open_repository(tmp_path) as repository:
        for word, is_inline in (("never", False), ("always", True), ("auto", True), ("never", False)):
            parameter = f'parameters {{ key: "inline_execution" value {{ string_value: "{word}" }} }}'
            write_model(tmp_path, "m", extra=parameter)
            await repository.load("m")
            assert _is_inline(repository.get("m", None)) is is_inline
            await infer(repository, "m")


async def test_a_batch_of_rows_is_whole_on_the_event_loop() -> None:
    async with _served(Moody, _config("always", batching=DYNAMIC), can_run_inline=True) as model:
        sent = [request(rows, 2, value=rows) for rows in (1, 3, 2)]
        responses = await asyncio.gather(*(model.submit(each).only() for each in sent))
        for each, response in zip(sent, responses, strict=True):
            np.testing.assert_array_equal(response.outputs[0].data, each.inputs["IN"].data * 2)


async def test_each_request_of_a_batch_brings_its_budget() -> None:
    noted_ns: list[int] = []

    class Noting(InlineGuard):
        def note(self, duration_ns: int) -> None:
            noted_ns.append(duration_ns)

    instance = Moody()
    async with _served(lambda _: instance, _config("always", batching=DYNAMIC), can_run_inline=True) as model:
        worker = model._engine.members[0].worker
        assert worker is not None
        worker.runner.guard = Noting(lambda: None)
        instance.delay_s = 0.01
        await _double(model, 1)
        await _double(model, *range(8))
        assert instance.batches[-2:] == [1, 8]
    lone_ns, batch_ns = noted_ns
    assert lone_ns >= 10_000_000
    assert 2_000_000 <= batch_ns < 10_000_000  # a fifth
