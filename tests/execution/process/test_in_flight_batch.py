"""What is sent next to a child process, and what becomes of those that share a batch with a request that kills."""

from __future__ import annotations

from typing import Any

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import CancelledError, InternalError, QueueTimeoutError
from modelserver.execution.process.in_flight_batch import InFlightBatch, InFlightQueue
from modelserver.execution.process.packing import Payload


def request(**fields: Any) -> InFlightRequest:
    return InFlightRequest(model_name="m", version=1, inputs={}, **fields)


def in_flight(*requests: InFlightRequest) -> tuple[InFlightBatch, list[Any]]:
    """A batch that was sent, and the list that gets its result."""
    results: list[Any] = []
    made = InFlightBatch(requests, lambda result, duration_ns: results.append((result, duration_ns)))
    made.write(1, Payload())
    return made, results


def test_suspects_go_one_by_one_before_all_else_and_their_batch_ends_with_the_last() -> None:
    queue = InFlightQueue()
    batch, results = in_flight(request(), request())
    other, _ = in_flight(request())
    queue.add(other)
    queue.isolate(batch)
    [first] = queue.take(0)
    assert first.is_suspect
    assert queue.take(0) == []
    first.finish(InternalError("it died again"))
    [second] = queue.take(0)
    answer = InferResponse([])
    second.finish([answer], 7)
    [(entries, duration_ns)] = results
    assert isinstance(entries[0], InternalError)
    assert (entries[1], duration_ns) == (answer, 7)
    assert queue.take(0) == [other]
    assert not queue


def test_a_suspect_that_its_child_never_began_is_sent_again() -> None:
    queue = InFlightQueue()
    batch, _ = in_flight(request(), request())
    queue.isolate(batch)
    [first] = queue.take(0)
    unseen, _ = in_flight(request())
    queue.put_back([first, unseen])
    assert queue.take(0) == [first]
    queue.has_answered(first)
    [second] = queue.take(0)
    queue.has_answered(second)
    assert queue.take(0) == [unseen]


def test_who_has_left_or_is_out_of_time_is_not_executed_again() -> None:
    queue = InFlightQueue()
    gone, late = request(), request(deadline_ns=10)
    gone.is_cancelled = True
    batch, results = in_flight(gone, late)
    queue.isolate(batch)
    assert queue.take(10) == []
    [(entries, _)] = results
    assert [type(entry) for entry in entries] == [CancelledError, QueueTimeoutError]


def test_those_that_wait_too_long_leave() -> None:
    queue = InFlightQueue()
    batch, _ = in_flight(request(), request())
    early, _ = in_flight(request())
    queue.isolate(batch)
    queue.add(early)
    queue.note_wait(1.0)
    later, _ = in_flight(request())
    queue.add(later)
    queue.note_wait(2.0)
    left = queue.take_waiting(1.5)
    assert (len(left), left[-1]) == (3, early)
    queue.has_child()
    assert queue.take_waiting(-1.0) == []
    assert queue.take(0) == [later]
