"""A loaded model with sequences, from `submit` to its instances."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.batching import batching_config, load_model, request
from support.gate import until
from support.instances import backend_of

from modelserver.backend import (
    Array,
    Backend,
    BatchInstance,
    InferRequest,
    InferResponse,
    InvalidArgumentError,
    Placement,
    Tensor,
    TensorInstance,
)
from modelserver.config.schema import (
    ModelConfig,
    ModelSequenceBatching,
    SequenceControl,
    SequenceControlInput,
    SequenceControlKind,
    SequenceState,
    SequenceStrategyDirect,
    SequenceStrategyOldest,
)
from modelserver.core.datatype import Datatype
from modelserver.core.response import RESCHEDULE
from modelserver.errors import UnavailableError
from modelserver.execution.model import Model

READY = SequenceControlInput(
    "READY", (SequenceControl(SequenceControlKind.CONTROL_SEQUENCE_READY, int32_false_true=(0, 1)),)
)
SUM = SequenceState("SUM", "SUM", Datatype.FP32, (-1,))
IDLE_US = 60_000_000


class Summing(TensorInstance):
    """OUT = SUM + IN, which is the next SUM; notes what it saw of READY."""

    def __init__(self, _placement: Placement) -> None:
        self.ready: list[list[int]] = []

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        if "READY" in inputs:
            self.ready.append(inputs["READY"].reshape(-1).tolist())
        total = inputs["IN"] + inputs["SUM"]
        return {"OUT": total, "SUM": total}


class Noting(BatchInstance):
    """Echoes, and notes which requests it saw and which sequences have ended."""

    def __init__(self, _placement: Placement) -> None:
        self.seen: list[str] = []
        self.is_closed = False
        self.ended: list[tuple[int | str, str]] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse]:
        self.entered.set()
        assert self.gate.wait(10), "the test left the gate shut"
        self.seen += [sent.id for sent in requests]
        return [InferResponse([Tensor("OUT", Datatype.FP32, sent.inputs["IN"].data)]) for sent in requests]

    def on_sequence_end(self, correlation_id: int | str, reason: str) -> None:
        self.ended.append((correlation_id, reason))

    def close(self) -> None:
        self.is_closed = True


class Counting(BatchInstance):
    """Is done with a request after as many executions as its first number says; notes START."""

    def __init__(self, _placement: Placement) -> None:
        self.runs: dict[str, list[bool]] = {}

    def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse]:
        return [self._answer(sent) for sent in requests]

    def _answer(self, sent: InferRequest) -> InferResponse:
        runs = self.runs.setdefault(sent.id, [])
        runs.append(sent.sequence_start)
        if len(runs) < sent.inputs["IN"].data[0, 0]:
            return RESCHEDULE
        return InferResponse([Tensor("OUT", Datatype.FP32, np.full((1, 1), len(runs), np.float32))])


def config_of(max_batch_size: int = 4, *, count: int = 1, **batching: Any) -> ModelConfig:
    batching = {"oldest": SequenceStrategyOldest(8), "max_sequence_idle_microseconds": IDLE_US, **batching}
    if "direct" in batching:
        batching["oldest"] = None
    return batching_config(max_batch_size, count=count, sequence_batching=ModelSequenceBatching(**batching))


def sent(name: str, *, value: float = 1.0, width: int = 1) -> InferRequest:
    """`+a1-`: request 1 of sequence a, with START and END."""
    bare = name.strip("+-")
    return request(
        value=value,
        width=width,
        id=bare,
        sequence_id=bare.rstrip("0123456789"),
        sequence_start=name.startswith("+"),
        sequence_end=name.endswith("-"),
    )


class Serving:
    """A loaded model and its instances; a context manager that leaves nothing."""

    def __init__(self, make: Callable[[Placement], Any], config: ModelConfig) -> None:
        self.instances: list[Any] = []

        def create(placement: Placement) -> Any:
            self.instances.append(make(placement))
            return self.instances[-1]

        self._backend: type[Backend] = backend_of(create)
        self._config = config
        self.model: Model

    async def __aenter__(self) -> Serving:
        self.model = await asyncio.to_thread(load_model, self._backend, self._config, asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.model.stop()
        await asyncio.to_thread(self.model.close)

    async def infer(self, *names: str, **fields: Any) -> list[list[float]]:
        """Send these at once; the first row of each answer."""
        streams = [self.model.submit(sent(name, **fields)) for name in names]
        return [(await stream.only()).outputs[0].data[0].tolist() for stream in streams]


@pytest.mark.parametrize("strategy", [{}, {"direct": SequenceStrategyDirect()}])
@pytest.mark.parametrize("count", [1, 2])
async def test_states_stay_with_their_sequences(strategy: dict[str, Any], count: int) -> None:
    async with Serving(Summing, config_of(2, count=count, state=(SUM,), **strategy)) as serving:
        assert await serving.infer("+a1", "a2", "+b1", value=2) == [[2], [4], [2]]
        assert await serving.infer("a3-", "b2", "+c1", value=3) == [[7], [5], [3]]
        assert await serving.infer("+b3", "c2-", value=1) == [[1], [4]]


async def test_sequences_whose_states_differ_in_shape_do_not_share_a_batch() -> None:
    async with Serving(Summing, config_of(state=(SUM,))) as serving:
        assert await serving.infer("+a1", width=2) == [[1, 1]]
        assert await serving.infer("+b1", width=3) == [[1, 1, 1]]
        two, three = (
            serving.model.submit(sent("a2", width=2, value=4)),
            serving.model.submit(sent("b2", width=3, value=5)),
        )
        assert (await two.only()).outputs[0].data.tolist() == [[5, 5]]
        assert (await three.only()).outputs[0].data.tolist() == [[6, 6, 6]]


async def test_rows_without_a_request_are_not_ready() -> None:
    config = config_of(3, direct=SequenceStrategyDirect(), control_input=(READY,), state=(SUM,))
    async with Serving(Summing, config) as serving:
        for name in ("+a1", "+b1", "+c1"):
            await serving.infer(name)
        assert await serving.infer("b2", value=5) == [[6]]
        assert serving.instances[0].ready == [[1], [0, 1], [0, 0, 1], [0, 1, 0]]
        statistics = serving.model.statistics.snapshot()
        assert statistics.inference_count == statistics.success.count == 4
        assert sorted(statistics.batch_stats) == [1, 2, 3]


async def test_an_instance_hears_of_every_end_but_those_it_never_saw() -> None:
    async with Serving(Noting, config_of(1, direct=SequenceStrategyDirect())) as serving:
        (instance,) = serving.instances
        await serving.infer("+a1", "a2-")
        await serving.infer("+b1", "+b2")
        await until(lambda: instance.ended == [("a", "end"), ("b", "restarted")], "ends were told")
        instance.entered.clear()
        instance.gate.clear()
        executing, waiting, other = (serving.model.submit(sent(name)) for name in ("b3", "b4", "+c1"))
        await asyncio.to_thread(instance.entered.wait)
        cancelled = sent("+d1")
        cancelled_stream = serving.model.submit(cancelled)
        cancelled.cancel()
        instance.gate.set()
        await executing.only()
        await waiting.only()
        with pytest.raises(Exception, match="was cancelled"):
            await cancelled_stream.only()
        last = serving.model.submit(sent("b5-"))
        await last.only()
        await other.only()
        await until(lambda: instance.ended[2:] == [("b", "end")], "the end of b was told")
        assert instance.seen == ["a1", "a2", "b1", "b2", "b3", "b4", "b5", "c1"]
    assert instance.ended[-1] == ("c", "unloaded")


async def test_an_idle_sequence_ends_by_itself() -> None:
    async with Serving(
        Noting, config_of(1, direct=SequenceStrategyDirect(), max_sequence_idle_microseconds=20_000)
    ) as serving:
        await serving.infer("+a1")
        assert await serving.infer("+b1", value=3) == [[3]]  # there is one slot only
        (instance,) = serving.instances
        assert instance.ended[0] == ("a", "idle")
        await until(lambda: serving.model.num_sequences == 0, "b is idle too")


async def test_iterative_requests_are_executed_until_the_model_is_done() -> None:
    async with Serving(Counting, config_of(iterative_sequence=True)) as serving:
        named = [sent("+a1", value=3), sent("+b1", value=1)]
        anonymous = request(value=2, id="x")
        streams = [serving.model.submit(each) for each in (*named, anonymous)]
        assert [(await stream.only()).outputs[0].data.item() for stream in streams] == [3, 1, 2]
        assert serving.instances[0].runs == {"a1": [True, False, False], "b1": [True], "x": [True, False]}
        await until(lambda: serving.model.num_sequences == 0, "all are done")
        assert serving.model.statistics.snapshot().success.count == 3
        with pytest.raises(InvalidArgumentError, match="must specify the START flag"):
            serving.model.submit(sent("c1"))


async def test_a_model_drains_when_its_sequences_have_ended() -> None:
    async with Serving(Noting, config_of()) as serving:
        await serving.infer("+a1", "+b1")
        serving.model.stop()
        draining = asyncio.create_task(serving.model.drain(None))
        with pytest.raises(UnavailableError):
            serving.model.submit(sent("+c1"))
        await serving.infer("a2-")
        await asyncio.sleep(0)
        assert not draining.done()
        await serving.infer("b2-")
        async with asyncio.timeout(60):
            assert await draining


async def test_an_instance_that_is_removed_finishes_its_sequences() -> None:
    config = config_of(1, count=2, direct=SequenceStrategyDirect())
    async with Serving(Noting, config) as serving:
        await serving.infer("+a1", "+b1")
        fewer = replace(config, instance_group=(replace(config.instance_group[0], count=1),))
        await asyncio.to_thread(serving.model.update_instances, fewer)
        assert len(serving.model.instances()) == 1
        assert not any(instance.is_closed for instance in serving.instances)
        await serving.infer("a2-", "b2-")
        await until(lambda: any(instance.is_closed for instance in serving.instances), "one of them goes")
        assert await serving.infer("+c1-", "+d1-", value=4) == [[4], [4]]
        assert [len(instance.seen) for instance in serving.instances] in ([4, 2], [2, 4])


async def test_an_unload_ends_the_sequences_of_removed_instances_too() -> None:
    config = config_of(1, count=2, direct=SequenceStrategyDirect())
    async with Serving(Noting, config) as serving:
        await serving.infer("+a1", "+b1")
        fewer = replace(config, instance_group=(replace(config.instance_group[0], count=1),))
        await asyncio.to_thread(serving.model.update_instances, fewer)
        await asyncio.to_thread(serving.model.close)
        assert sorted(instance.ended for instance in serving.instances) == [[("a", "unloaded")], [("b", "unloaded")]]
        assert all(instance.is_closed for instance in serving.instances)


async def test_instances_come_back_while_those_of_before_finish_their_sequences() -> None:
    config = config_of(1, count=2, direct=SequenceStrategyDirect())
    fewer = replace(config, instance_group=(replace(config.instance_group[0], count=1),))
    async with Serving(Noting, config) as serving:
        await serving.infer("+a1", "+b1")
        for groups in (fewer, config):
            await asyncio.to_thread(serving.model.update_instances, groups)
        assert await serving.infer("+c1-", value=4) == [[4]]
        assert [instance.seen for instance in serving.instances if len(instance.seen) == 1] != []
        await serving.infer("a2-", "b2-")
        await until(lambda: sum(instance.is_closed for instance in serving.instances) == 1, "one of them goes")
        assert len(serving.instances) == 3


async def test_a_failed_batch_fails_its_requests_and_no_sequence() -> None:
    class Failing(Noting):
        def execute(self, requests: Sequence[InferRequest]) -> list[InferResponse]:
            if requests[0].id == "a2":
                raise ValueError("no")
            return super().execute(requests)

    async with Serving(Failing, config_of()) as serving:
        await serving.infer("+a1")
        with pytest.raises(Exception, match="ValueError: no"):
            await serving.infer("a2")
        assert await serving.infer("a3-") == [[1]]
