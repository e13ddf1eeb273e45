"""Models that answer later or many times: every request ends exactly once, whatever the model does."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.batching import batching_config, load_model, request, tensor
from support.gate import until
from support.instances import backend_of

from modelserver.backend import (
    BatchInstance,
    InferRequest,
    InferResponse,
    InternalError,
    InvalidArgumentError,
    Placement,
    ResponseSender,
    RowResponse,
)
from modelserver.config.schema import ModelDynamicBatching, ModelTransactionPolicy, ModelWarmup, WarmupInput
from modelserver.core.datatype import Datatype
from modelserver.core.reading import MAX_UNREAD
from modelserver.core.response import ResponseStream
from modelserver.errors import CancelledError, ErrorCode, ServerError, UnavailableError
from modelserver.execution.model import Model
from modelserver.telemetry.statistics_snapshot import FailureReason

DECOUPLED = ModelTransactionPolicy(decoupled=True)
ENDED = "sender has been closed"
DATATYPES = {"OUT": Datatype.FP32}


def out(value: float) -> InferResponse:
    return InferResponse([tensor("OUT", np.full((1, 1), value, np.float32))])


class Keeping(BatchInstance):
    """Leaves every request to the test, which answers through `senders`; `answers` are returned instead."""

    answers_later = True

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement = placement
        self.senders: list[ResponseSender] = []
        self.batches: list[int] = []
        self.answers: Callable[[Sequence[InferRequest]], Any] = lambda _: None
        self.is_closed = False

    def execute(self, requests: Sequence[InferRequest]) -> Any:
        self.senders += [each.sender for each in requests]
        self.batches.append(len(requests))
        return self.answers(requests)

    def close(self) -> None:
        self.is_closed = True


class Loaded:
    def __init__(self, model: Model, instances: list[Keeping]) -> None:
        self.model = model
        self.instances = instances

    @property
    def instance(self) -> Keeping:
        return self.instances[0]

    async def submit(self, *requests: InferRequest) -> list[ResponseStream]:
        """Their streams, once the instance has them."""
        before = len(self.instance.senders)
        streams = [self.model.submit(each) for each in requests]
        await until(lambda: len(self.instance.senders) == before + len(requests), "executed")
        return streams

    async def one(self, **fields: Any) -> tuple[InferRequest, ResponseStream, ResponseSender]:
        made = request(**fields)
        (stream,) = await self.submit(made)
        return made, stream, self.instance.senders[-1]


Load = Callable[..., Awaitable[Loaded]]


@pytest.fixture
async def load() -> AsyncIterator[Load]:
    loaded: list[Loaded] = []

    async def make(policy: ModelTransactionPolicy | None = DECOUPLED, count: int = 1, **fields: Any) -> Loaded:
        instances: list[Keeping] = []

        def create(placement: Placement) -> Keeping:
            instances.append(Keeping(placement))
            return instances[-1]

        config = batching_config(count=count, model_transaction_policy=policy, **fields)
        model = await asyncio.to_thread(load_model, backend_of(create), config, asyncio.get_running_loop())
        loaded.append(Loaded(model, instances))
        return loaded[-1]

    yield make
    for each in loaded:
        for instance in each.instances:
            instance.senders.clear()
        each.model.stop()
        await each.model.drain(10)
        await asyncio.to_thread(each.model.close)
        assert all(instance.is_closed for instance in each.instances)


async def collect(stream: ResponseStream) -> list[InferResponse]:
    return [response async for response in stream]


def says(responses: Sequence[InferResponse]) -> list[Any]:
    """What each response says: its value, its error's text, or None."""
    return [
        each.error.message if each.error is not None else each.outputs[0].data.item() if each.outputs else None
        for each in responses
    ]


async def test_any_number_of_responses_in_order(load: Load) -> None:
    loaded = await load()
    for count in (0, 1, 5):
        _, stream, sender = await loaded.one()
        for value in range(count):
            sender.send(out(value))
        sender.finish()
        responses = await collect(stream)
        assert says(responses) == [*range(count), None]
        assert [response.is_final for response in responses] == [False] * count + [True]


async def test_the_last_response_may_have_outputs(load: Load) -> None:
    _, stream, sender = await (await load()).one()
    sender.send(out(1))
    sender.finish(out(2))
    assert says(await collect(stream)) == [1, 2]


async def test_what_is_sent_in_one_turn_of_the_loop_is_one_call(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = await load()
    _, stream, sender = await loaded.one()
    calls: list[object] = []
    scheduler = loaded.model._engine.scheduler  # the dispatcher's only way to the loop
    post = scheduler.post
    monkeypatch.setattr(scheduler, "post", lambda *call: (calls.append(call), post(*call)))
    for value in range(10):
        sender.send(out(value))
    sender.finish()
    assert len(calls) == 1
    assert len(await collect(stream)) == 11


async def test_nothing_is_sent_after_the_end(load: Load) -> None:
    _, stream, sender = await (await load()).one()
    sender.finish()
    for again in (sender.finish, lambda: sender.send(out(1)), lambda: sender.finish(out(1))):
        with pytest.raises(InternalError, match=ENDED):
            again()
    assert says(await collect(stream)) == [None]


async def test_errors_are_responses(load: Load) -> None:
    loaded = await load()
    _, stream, sender = await loaded.one()
    sender.send(InvalidArgumentError("early"))
    sender.send(InferResponse(error=InvalidArgumentError("later")))
    sender.send(out(1))
    sender.finish(InvalidArgumentError("last"))
    assert says(await collect(stream)) == ["early", "later", 1, "last"]


@pytest.mark.parametrize("policy", [DECOUPLED, None], ids=["decoupled", "deferred"])
async def test_a_dropped_sender_ends_the_request(load: Load, policy: ModelTransactionPolicy | None) -> None:
    loaded = await load(policy)
    _, stream, sender = await loaded.one()
    loaded.instance.senders.clear()
    del sender
    assert "dropped the response sender" in says(await collect(stream))[0]


async def test_a_sender_that_nobody_took_ends_the_request(load: Load) -> None:
    class Forgetful(BatchInstance):
        answers_later = True

        def execute(self, requests: Sequence[InferRequest]) -> None:
            assert requests

    model = await asyncio.to_thread(
        load_model, backend_of(lambda _: Forgetful()), batching_config(), asyncio.get_running_loop()
    )
    assert "dropped" in says(await collect(model.submit(request())))[0]
    await asyncio.to_thread(model.close)


async def test_dropping_needs_no_garbage_collector(load: Load) -> None:
    loaded = await load()
    gc.disable()
    try:
        _, stream, sender = await loaded.one()
        sender.send(out(1))
        loaded.instance.senders.clear()
        del sender
        assert len(await asyncio.wait_for(collect(stream), 60)) == 2
    finally:
        gc.enable()


async def test_the_request_has_a_sender_only_while_it_is_executed(load: Load) -> None:
    made, stream, sender = await (await load()).one()
    with pytest.raises(InternalError, match="only while execute"):
        _ = made.sender
    sender.finish()
    await collect(stream)
    with pytest.raises(InternalError, match="only while execute"):
        _ = request().sender


@pytest.mark.parametrize("is_final", [False, True])
async def test_wrong_outputs_end_the_request_and_are_told_to_both(load: Load, is_final: bool) -> None:
    _, stream, sender = await (await load()).one()
    wrong = InferResponse([tensor("OTHER", np.ones((1, 1), np.float32))])
    with pytest.raises(InternalError, match="unexpected output 'OTHER'"):
        sender.finish(wrong) if is_final else sender.send(wrong)
    assert "unexpected output 'OTHER'" in says(await collect(stream))[0]
    with pytest.raises(InternalError, match=ENDED):
        sender.finish()


async def test_a_row_is_as_good_as_its_tensors(load: Load) -> None:
    _, stream, sender = await (await load(dims=(), max_batch_size=1)).one()
    sender.send(RowResponse(values={"OUT": 2.5}, datatypes=DATATYPES))
    sender.finish(RowResponse(values={"OUT": 3.0}, datatypes=DATATYPES))
    assert says(await collect(stream)) == [2.5, 3.0]
    _, stream, sender = await (await load()).one(outputs=())
    sender.finish(RowResponse(values={"OUT": 2.5}, datatypes=DATATYPES))
    assert says(await collect(stream)) == [None]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (RowResponse(values={"OTHER": 1.0}, datatypes={"OTHER": Datatype.FP32}), "unexpected output 'OTHER'"),
        (RowResponse(values={"OUT": 1.0}), "no datatype"),
    ],
)
async def test_a_row_that_the_model_does_not_have_ends_the_request(load: Load, row: RowResponse, text: str) -> None:
    _, stream, sender = await (await load()).one()
    with pytest.raises(InternalError, match=text):
        sender.send(row)
    assert text in says(await collect(stream))[0]


async def test_outputs_that_were_not_asked_for_are_dropped_and_may_be_missing(load: Load) -> None:
    made, stream, sender = await (await load()).one(outputs=("OUT",))
    sender.send(out(1))
    sender.send(InferResponse(parameters={"note": True}))
    sender.finish()
    responses = await collect(stream)
    assert [len(response.outputs) for response in responses] == [1, 0, 0]
    assert made.outputs == ("OUT",)


async def test_nothing_of_a_request_stays_in_memory(load: Load) -> None:
    loaded = await load()
    gc.disable()
    try:
        made, stream, sender = await loaded.one()
        kept = weakref.ref(made.inputs["IN"].data)
        sender.send(out(1))
        sender.finish()
        await collect(stream)
        loaded.instance.senders.clear()
        del made, stream, sender
        await until(lambda: kept() is None, "the request went")
    finally:
        gc.enable()


# Models that are not decoupled.


async def test_one_response_may_come_later(load: Load) -> None:
    loaded = await load(None)
    for end in (lambda sender: sender.send(out(3)), lambda sender: sender.finish(out(3))):
        _, stream, sender = await loaded.one()
        assert loaded.model.inflight == 1
        end(sender)
        response = await stream.only()
        assert (response.is_final, says([response])) == (True, [3])
    sender_after = loaded.instance.senders[-2]
    sender_after.finish()  # the empty end that Triton's models send
    with pytest.raises(InternalError, match=ENDED):
        sender_after.finish()


async def test_one_response_and_no_more(load: Load) -> None:
    loaded = await load(None)
    _, stream, sender = await loaded.one()
    with pytest.raises(InternalError, match="cannot send complete final before sending a response"):
        sender.finish()
    sender.send(out(1))
    with pytest.raises(InternalError, match="cannot send more than one response"):
        sender.send(out(2))
    assert says(await collect(stream)) == [1]


# Batches.


async def test_a_batch_may_be_answered_in_part_now_and_in_part_later(load: Load) -> None:
    loaded = await load(None, dynamic_batching=ModelDynamicBatching(max_queue_delay_microseconds=200_000))
    loaded.instance.answers = lambda requests: [out(0), None, InvalidArgumentError("not you"), None][: len(requests)]
    streams = await loaded.submit(*[request(value=value) for value in range(4)])
    assert loaded.instance.batches == [4]
    assert says([(await collect(streams[0]))[0]]) == [0]
    assert says(await collect(streams[2])) == ["not you"]
    for position in (3, 1):
        loaded.instance.senders[position].finish(out(position))
        assert says(await collect(streams[position])) == [position]


async def test_an_exception_fails_those_that_have_not_ended(load: Load) -> None:
    loaded = await load(dynamic_batching=ModelDynamicBatching(max_queue_delay_microseconds=200_000))

    def fail(requests: Sequence[InferRequest]) -> None:
        loaded.instance.senders[0].finish(out(1))
        loaded.instance.senders[1].send(out(2))
        raise RuntimeError("boom")

    loaded.instance.answers = fail
    streams = await loaded.submit(*[request() for _ in range(3)])
    said = [says(await collect(stream)) for stream in streams]
    assert said[0] == [1]
    assert said[1][0] == 2
    assert "RuntimeError: boom" in said[1][1]
    assert "RuntimeError: boom" in said[2][0]
    with pytest.raises(InternalError, match=ENDED):
        loaded.instance.senders[2].send(out(1))


@pytest.mark.parametrize(
    ("answers", "text"),
    [(lambda _: [], "0 responses"), (lambda _: 5, "int"), (lambda _: ["x"], "entry of type str")],
)
async def test_what_is_no_answer(load: Load, answers: Callable[[object], object], text: str) -> None:
    loaded = await load()
    loaded.instance.answers = answers
    _, stream, _ = await loaded.one()
    assert text in says(await collect(stream))[0]


async def test_an_answer_after_the_end_is_logged(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    loaded = await load()

    def twice(_: object) -> list[InferResponse]:
        loaded.instance.senders[-1].finish(out(1))
        return [out(2)]

    loaded.instance.answers = twice
    _, stream, _ = await loaded.one()
    assert says(await collect(stream)) == [1]
    await until(lambda: "had ended" in caplog.text, "it was logged")


# Readers.


async def test_a_cancel_reaches_the_sender(load: Load) -> None:
    made, stream, sender = await (await load()).one()
    told: list[str] = []
    sender.watch(on_cancel=lambda: told.append("cancel"))
    assert not sender.is_cancelled
    made.cancel()
    assert sender.is_cancelled
    assert told == ["cancel"]
    sender.finish(CancelledError("as you wish"))
    assert says(await collect(stream)) == ["as you wish"]


async def test_a_cancel_before_the_execution_too(load: Load) -> None:
    loaded = await load()
    made = request()

    def cancel(_: object) -> None:
        made.is_cancelled = True  # as by the loop, between the queue and the sender

    loaded.instance.answers = cancel
    (stream,) = await loaded.submit(made)
    assert loaded.instance.senders[0].is_cancelled
    loaded.instance.senders[0].finish()
    await collect(stream)


class SlowReader(ResponseStream):
    reads_later = True

    def __init__(self) -> None:
        super().__init__()
        self.delivered: list[InferResponse] = []

    @property
    def has_ended(self) -> bool:
        return bool(self.delivered) and self.delivered[-1].is_final

    def deliver(self, response: InferResponse) -> None:
        self.delivered.append(response)


async def test_a_sender_waits_for_a_slow_reader(load: Load) -> None:
    reader = SlowReader()
    _, _, sender = await (await load()).one(stream=reader)
    num_sent = [0]

    def send() -> None:
        for value in range(MAX_UNREAD + 10):
            sender.send(out(value))
            num_sent[0] += 1
        sender.finish()

    thread = threading.Thread(target=send, name="model")
    thread.start()
    await until(lambda: len(reader.delivered) == MAX_UNREAD, "the window is full")
    await until(lambda: num_sent == [MAX_UNREAD], "the last one is sent")
    await asyncio.sleep(0.02)
    assert num_sent == [MAX_UNREAD]
    assert not sender.has_room
    for _ in range(5):
        reader.has_read()
    await until(lambda: len(reader.delivered) == MAX_UNREAD + 5, "as many as were read")
    for _ in range(5):
        reader.has_read()
    await until(lambda: reader.has_ended, "all came")
    await asyncio.to_thread(thread.join)


async def test_who_does_not_want_to_wait_is_told_of_room(load: Load) -> None:
    reader = SlowReader()
    _, _, sender = await (await load()).one(stream=reader)
    told: list[str] = []
    sender.watch(on_room=lambda: told.append("room"))
    for value in range(MAX_UNREAD + 1):
        sender.send(out(value), wait=False)
    await until(lambda: len(reader.delivered) == MAX_UNREAD + 1, "all are there")
    reader.has_read()
    assert told == []
    reader.has_read()
    assert told == ["room"]
    sender.finish()
    await until(lambda: reader.has_ended, "the end")


async def test_a_cancel_frees_a_sender_that_waits(load: Load) -> None:
    reader = SlowReader()
    made, _, sender = await (await load()).one(stream=reader)
    for value in range(MAX_UNREAD):
        sender.send(out(value))
    thread = threading.Thread(target=sender.send, args=(out(-1),), name="model")
    thread.start()
    made.cancel()
    await asyncio.to_thread(thread.join)
    sender.finish()
    await until(lambda: reader.has_ended, "the end")


async def test_on_the_event_loop_nobody_waits(load: Load) -> None:
    reader = SlowReader()
    _, _, sender = await (await load()).one(stream=reader)
    for value in range(2 * MAX_UNREAD):
        sender.send(out(value))
    sender.finish()
    await until(lambda: reader.has_ended, "the end")


# Lifecycle.


async def test_a_request_is_in_flight_until_its_end(load: Load) -> None:
    loaded = await load()
    _, stream, sender = await loaded.one()
    loaded.model.stop()
    assert not await loaded.model.drain(0.02)
    sender.send(out(1))
    assert not await loaded.model.drain(0.02)
    sender.finish()
    assert await loaded.model.drain(10)
    assert len(await collect(stream)) == 2
    assert loaded.model.inflight == 0


async def test_closing_waits_and_then_ends_what_is_open(load: Load) -> None:
    loaded = await load()
    _, patient, first = await loaded.one()
    _, stuck, second = await loaded.one()
    closing = asyncio.create_task(asyncio.to_thread(loaded.model.close, 2.0))
    await asyncio.sleep(0.05)
    assert not loaded.instance.is_closed
    first.finish(out(1))
    await closing
    assert loaded.instance.is_closed
    assert says(await collect(patient)) == [1]
    (response,) = await collect(stuck)
    assert isinstance(response.error, UnavailableError)
    with pytest.raises(InternalError, match=ENDED):
        second.send(out(1))
    assert second.is_cancelled


async def test_an_instance_that_is_removed_finishes_its_requests(load: Load) -> None:
    loaded = await load(count=2)
    for instance in loaded.instances[1:]:
        instance.senders = loaded.instances[0].senders
    streams = [(await loaded.one())[1] for _ in range(2)]
    update = asyncio.create_task(
        asyncio.to_thread(loaded.model.update_instances, batching_config(count=1, model_transaction_policy=DECOUPLED))
    )
    await asyncio.sleep(0.05)
    for sender in loaded.instances[0].senders:
        sender.finish(out(1))
    await update
    assert [says(await collect(stream)) for stream in streams] == [[1], [1]]
    assert sorted(instance.is_closed for instance in loaded.instances) == [False, True]


WARMUP = ModelWarmup("zeros", 1, {"IN": WarmupInput(Datatype.FP32, (1,), zero_data=True)})


class Threaded(BatchInstance):
    """Answers from threads, twice, and with `failure` the second time."""

    answers_later = True
    failure: InvalidArgumentError | None = None
    num_warm = 0

    def execute(self, requests: Sequence[InferRequest]) -> None:
        for each in requests:
            threading.Thread(target=self._answer, args=(each.sender,)).start()

    def _answer(self, sender: ResponseSender) -> None:
        sender.send(out(1))
        Threaded.num_warm += 1
        sender.finish(self.failure)


@pytest.mark.parametrize("inline", [{}, {"parameters": {"inline_execution": "auto"}}], ids=["worker", "measured"])
async def test_warmup_waits_for_the_last_response(inline: dict[str, Any]) -> None:
    Threaded.num_warm = 0
    config = batching_config(model_transaction_policy=DECOUPLED, model_warmup=(WARMUP,), **inline)
    backend = backend_of(lambda _: Threaded(), can_run_inline=True)
    model = await asyncio.to_thread(load_model, backend, config, asyncio.get_running_loop())
    assert Threaded.num_warm > 0
    assert says(await collect(model.submit(request()))) == [1, None]
    assert model.statistics.snapshot().success.count == 1
    model.stop()
    await model.drain(10)
    await asyncio.to_thread(model.close)


async def test_warmup_hears_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Threaded, "failure", InvalidArgumentError("too cold"))
    config = batching_config(model_transaction_policy=DECOUPLED, model_warmup=(WARMUP,))
    with pytest.raises(ServerError, match="too cold"):
        await asyncio.to_thread(load_model, backend_of(lambda _: Threaded()), config, asyncio.get_running_loop())


async def test_on_the_event_loop_too() -> None:
    config = batching_config(model_transaction_policy=DECOUPLED, parameters={"inline_execution": "always"})
    backend = backend_of(lambda _: Threaded(), can_run_inline=True)
    model = await asyncio.to_thread(load_model, backend, config, asyncio.get_running_loop())
    assert all(instance.is_inline for instance in model.instances())
    assert says(await collect(model.submit(request()))) == [1, None]
    model.stop()
    assert await model.drain(10)
    await asyncio.to_thread(model.close)


# Numbers.


async def test_statistics_of_a_success(load: Load) -> None:
    loaded = await load()
    _, stream, sender = await loaded.one()
    began_s = time.monotonic()
    await asyncio.sleep(0.02)
    lived_ns = (time.monotonic() - began_s) * 1e9
    sender.send(out(1))
    sender.finish()
    await collect(stream)
    seen = loaded.model.statistics.snapshot()
    assert (seen.success.count, seen.fail.count, seen.queue.count, seen.compute_infer.count) == (1, 0, 1, 1)
    assert (seen.execution_count, seen.inference_count, seen.batch_stats[1].compute_infer.count) == (1, 1, 1)
    assert seen.success.ns >= seen.compute_infer.ns >= lived_ns
    assert seen.request_histogram.count == seen.queue_histogram.count == 1
    first, last = seen.response_stats[0], seen.response_stats[1]
    assert (first.success.count, first.compute_output.count, first.empty_response.count) == (1, 1, 0)
    assert first.compute_infer.ns >= lived_ns
    assert (last.success.count, last.compute_output.count, last.empty_response.count) == (0, 0, 1)


async def test_statistics_of_failures(load: Load) -> None:
    loaded = await load()
    _, failed, sender = await loaded.one()
    sender.send(InvalidArgumentError("x"))
    sender.finish()
    made, left, sender = await loaded.one()
    sender.send(out(1))
    made.cancel()
    sender.finish(CancelledError("x"))
    await collect(failed)
    await collect(left)
    seen = loaded.model.statistics.snapshot()
    assert (seen.success.count, seen.fail.count, seen.execution_count) == (0, 2, 2)
    assert seen.failures[FailureReason.BACKEND] == seen.failures[FailureReason.CANCELED] == 1
    assert (seen.response_stats[0].fail.count, seen.response_stats[0].success.count) == (1, 1)
    assert (seen.response_stats[1].empty_response.count, seen.response_stats[1].cancel.count) == (1, 1)


async def test_other_models_have_no_numbers_of_responses(load: Load) -> None:
    loaded = await load(None)
    _, stream, sender = await loaded.one()
    sender.finish(out(1))
    await collect(stream)
    seen = loaded.model.statistics.snapshot()
    assert (seen.response_stats, seen.success.count) == ({}, 1)


async def test_codes_of_errors_are_kept(load: Load) -> None:
    _, stream, sender = await (await load()).one()
    sender.finish(UnavailableError("later"))
    (response,) = await collect(stream)
    assert response.error is not None
    assert response.error.code is ErrorCode.UNAVAILABLE
