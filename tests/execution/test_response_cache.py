"""The cache before a scheduler that a test plays by hand: it answers, fails or cancels what was handed to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.batching import request
from support.gate import until

from modelserver.cache.local import LocalStore
from modelserver.cache.store import NO_CACHE_PARAMETER, CachedAnswer, RequestKey
from modelserver.core.clock import SystemClock
from modelserver.core.request import InFlightRequest, RegionInput, RegionSlice, Transfer
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.core.tensor import Tensor
from modelserver.errors import CancelledError, ErrorCode, InternalError, ServerError, UnavailableError
from modelserver.execution.response_cache import ResponseCache
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason


class Desk:
    """A cache, and the requests that it has handed to the scheduler."""

    def __init__(self, store: LocalStore | None = None) -> None:
        self.store = store or LocalStore(1 << 24)
        self.statistics = ModelStatistics()
        self.taken: list[InFlightRequest] = []
        self.refusal: ServerError | None = None
        self.generation = b"1"
        self.cache = ResponseCache(
            self.store,
            lambda: self.generation,
            self._submit,
            model_name="m",
            statistics=self.statistics,
            loop=asyncio.get_running_loop(),
            clock=SystemClock(),
        )

    def _submit(self, sent: InFlightRequest) -> ResponseStream:
        if self.refusal is not None:
            raise self.refusal
        if sent.is_cancelled:
            raise CancelledError("was cancelled")
        self.taken.append(sent)
        return sent.stream

    def answer(self, position: int = -1) -> None:
        sent = self.taken[position]
        tensor = sent.inputs["IN"]
        sent.stream.deliver(InferResponse([Tensor("OUT", tensor.datatype, tensor.data * 2)]))

    def fail(self, error: ServerError, position: int = -1) -> None:
        self.taken[position].stream.deliver(InferResponse(error=error))

    @property
    def hits_and_misses(self) -> tuple[int, int]:
        numbers = self.statistics.snapshot()
        return numbers.cache_hit.count, numbers.cache_miss.count


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Read:
    """What came for one request, read where its client reads."""

    def __init__(self, dispatcher: Desk, value: float = 1.0, **fields: object) -> None:
        self.request = request(value=value, **fields)
        self.responses: list[InferResponse] = []
        self.request.stream.subscribe(self.responses.append)
        dispatcher.cache.submit(self.request)

    @property
    def result(self) -> float:
        [response] = self.responses
        assert response.error is None
        return float(response.outputs[0].data.flat[0])

    @property
    def error(self) -> ErrorCode:
        [response] = self.responses
        assert response.error is not None
        return response.error.code


async def test_what_was_answered_is_answered_again() -> None:
    dispatcher = Desk()
    first = Read(dispatcher)
    dispatcher.answer()
    second = Read(dispatcher)
    assert first.result == second.result == 2.0
    assert len(dispatcher.taken) == 1
    assert dispatcher.hits_and_misses == (1, 1)
    assert dispatcher.cache.num_waiting == 0


async def test_equal_requests_wait_for_the_first() -> None:
    dispatcher = Desk()
    reads = [Read(dispatcher) for _ in range(4)]
    other = Read(dispatcher, 5.0)
    assert len(dispatcher.taken) == 2
    assert dispatcher.cache.num_waiting == 3
    dispatcher.answer(0)
    assert [read.result for read in reads] == [2.0] * 4
    assert other.responses == []
    assert dispatcher.hits_and_misses == (3, 1)
    assert dispatcher.cache.num_waiting == 0


async def test_when_the_first_is_cancelled_another_leads() -> None:
    dispatcher = Desk()
    reads = [Read(dispatcher) for _ in range(3)]
    dispatcher.fail(CancelledError("gone"))
    await turns()
    assert len(dispatcher.taken) == 2
    assert reads[1].responses == reads[2].responses == []
    late = Read(dispatcher)
    dispatcher.answer()
    assert [read.result for read in (*reads[1:], late)] == [2.0] * 3
    assert reads[0].error is ErrorCode.CANCELLED
    assert dispatcher.cache.num_waiting == 0


async def test_when_the_first_fails_all_that_waited_are_executed() -> None:
    dispatcher = Desk()
    reads = [Read(dispatcher) for _ in range(3)]
    dispatcher.fail(InternalError("bad luck"))
    await turns()
    assert len(dispatcher.taken) == 3
    dispatcher.answer(1)
    dispatcher.fail(InternalError("again"), 2)
    assert reads[0].error is reads[2].error is ErrorCode.INTERNAL
    assert reads[1].result == 2.0
    assert dispatcher.cache.num_waiting == 0
    assert Read(dispatcher).result == 2.0


async def test_a_failure_is_never_kept() -> None:
    dispatcher = Desk()
    Read(dispatcher)
    dispatcher.fail(InternalError("bad luck"))
    Read(dispatcher)
    assert len(dispatcher.taken) == 2
    assert dispatcher.store.counts.num_entries == 0
    assert dispatcher.hits_and_misses == (0, 1)


async def test_a_refusal_is_the_answer_of_that_request_only() -> None:
    dispatcher = Desk()
    dispatcher.refusal = UnavailableError("the queue is full")
    refused = Read(dispatcher)
    assert refused.error is ErrorCode.UNAVAILABLE
    dispatcher.refusal = None
    Read(dispatcher)
    assert len(dispatcher.taken) == 1
    assert dispatcher.cache.num_waiting == 0


@pytest.mark.parametrize("position", [1, 2, 3])
async def test_who_waits_may_leave(position: int) -> None:
    dispatcher = Desk()
    reads = [Read(dispatcher) for _ in range(4)]
    reads[position].request.cancel()
    assert reads[position].error is ErrorCode.CANCELLED
    assert dispatcher.cache.num_waiting == 2
    dispatcher.answer()
    assert [read.result for number, read in enumerate(reads) if number != position] == [2.0] * 3
    assert len(reads[position].responses) == 1
    assert dispatcher.statistics.snapshot().failures[FailureReason.CANCELED] == 1


@pytest.mark.parametrize("error", [CancelledError("gone"), InternalError("bad luck")])
async def test_who_leaves_while_another_takes_over_is_answered_once(error: ServerError) -> None:
    dispatcher = Desk()
    reads = [Read(dispatcher) for _ in range(3)]
    dispatcher.fail(error)
    for read in reads[1:]:
        read.request.cancel()
    await turns(6)
    assert [read.error for read in reads[1:]] == [ErrorCode.CANCELLED] * 2
    assert dispatcher.cache.num_waiting == 0
    assert len(dispatcher.taken) == 1


async def test_who_waits_has_a_deadline() -> None:
    dispatcher = Desk()
    Read(dispatcher)
    waiting = Read(dispatcher, deadline_ns=time.monotonic_ns() + 10_000_000)
    await until(lambda: bool(waiting.responses), "it was told")
    assert waiting.error is ErrorCode.UNAVAILABLE
    assert dispatcher.statistics.snapshot().failures[FailureReason.REJECTED] == 1
    dispatcher.answer()
    assert len(waiting.responses) == 1


async def test_another_priority_does_not_wait() -> None:
    dispatcher = Desk()
    Read(dispatcher, priority=2)
    urgent = Read(dispatcher, priority=1)
    assert len(dispatcher.taken) == 2
    dispatcher.answer(1)
    assert urgent.result == 2.0
    dispatcher.answer(0)
    assert dispatcher.cache.num_waiting == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"parameters": {NO_CACHE_PARAMETER: True}},
        {"is_decoupled": True},
        {
            "transfer": Transfer(
                inputs=(RegionInput("IN", request().inputs["IN"].datatype, (1, 1), RegionSlice("r", 0, 4)),)
            )
        },
    ],
    ids=["opted out", "decoupled", "in shared memory"],
)
async def test_some_requests_pass_by(fields: dict[str, object]) -> None:
    dispatcher = Desk()
    for _ in range(2):
        Read(dispatcher, **fields)
        dispatcher.answer()
    assert len(dispatcher.taken) == 2
    assert dispatcher.hits_and_misses == (0, 0)
    assert dispatcher.store.counts.lookups == 0


async def test_large_requests_are_hashed_beside_the_loop() -> None:
    dispatcher = Desk()
    width = 1 << 18
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))  # its work is done in order
    reads = [Read(dispatcher, width=width) for _ in range(2)]
    assert dispatcher.cache.num_waiting == 2
    await loop.run_in_executor(None, int)
    assert (len(dispatcher.taken), dispatcher.cache.num_waiting) == (1, 1)
    dispatcher.answer()
    assert [read.result for read in reads] == [2.0, 2.0]
    await until(lambda: dispatcher.store.counts.num_entries == 1, "the answer is kept")
    again = Read(dispatcher, width=width)
    await until(lambda: bool(again.responses), "it was answered")
    assert again.result == 2.0
    np.testing.assert_array_equal(again.responses[0].outputs[0].data, np.full((1, width), 2.0, np.float32))
    assert len(dispatcher.taken) == 1
    assert dispatcher.hits_and_misses == (2, 1)


async def test_a_large_request_that_is_cancelled_meanwhile_is_refused() -> None:
    dispatcher = Desk()
    read = Read(dispatcher, width=1 << 18)
    read.request.cancel()
    await until(lambda: bool(read.responses), "it was answered")
    assert read.error is ErrorCode.CANCELLED
    assert dispatcher.taken == []


async def test_stopping_hands_on_what_was_accepted_and_refuses_the_rest() -> None:
    dispatcher = Desk()
    reads = [Read(dispatcher) for _ in range(3)]
    stopped: list[bool] = []
    dispatcher.cache.stop(lambda: stopped.append(True))
    with pytest.raises(UnavailableError, match="being unloaded"):
        dispatcher.cache.submit(request())
    dispatcher.fail(InternalError("bad luck"))
    assert stopped == []
    await turns()
    assert stopped == [True]
    for position in (1, 2):
        dispatcher.answer(position)
    assert [read.result for read in reads[1:]] == [2.0, 2.0]
    assert dispatcher.store.counts.num_entries == 0


async def test_stopping_forgets_what_was_kept() -> None:
    dispatcher = Desk()
    Read(dispatcher)
    dispatcher.answer()
    assert dispatcher.store.counts.num_entries == 1
    stopped: list[bool] = []
    dispatcher.cache.stop(lambda: stopped.append(True))
    assert stopped == [True]
    assert dispatcher.store.counts.num_entries == 0


async def test_another_generation_begins_anew() -> None:
    dispatcher = Desk()
    Read(dispatcher)
    dispatcher.answer()
    dispatcher.generation = b"2"
    Read(dispatcher)
    assert len(dispatcher.taken) == 2
    assert dispatcher.store.counts.num_entries == 0


async def test_the_end_of_waiting_is_told() -> None:
    dispatcher = Desk()
    told: list[int] = []
    Read(dispatcher)
    Read(dispatcher)
    dispatcher.cache.on_idle = lambda: told.append(dispatcher.cache.num_waiting)
    dispatcher.answer()
    assert told == [0]


class SlowStore(LocalStore):
    """Finds later, as a store that has to ask somebody does."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.asked: list[Callable[[], None]] = []

    def look_up(self, key: RequestKey, found: Callable[[CachedAnswer | None], None]) -> None:
        self.asked.append(lambda: found(self.find(key)))


async def test_equal_requests_wait_for_a_lookup_that_takes_its_time() -> None:
    store = SlowStore()
    dispatcher = Desk(store)
    reads = [Read(dispatcher) for _ in range(3)]
    assert len(store.asked) == 1
    assert dispatcher.cache.num_waiting == 3
    store.asked.pop()()
    assert dispatcher.cache.num_waiting == 2
    dispatcher.answer()
    found = [Read(dispatcher) for _ in range(2)]
    store.asked.pop()()
    assert [read.result for read in reads + found] == [2.0] * 5
    assert len(dispatcher.taken) == 1
    assert dispatcher.hits_and_misses == (4, 1)
