"""Who is woken when, and what only several workers show; the rest is in the traces."""

from __future__ import annotations

from typing import Any

import pytest
from support.batching import batching_config, request
from support.integrity import check_integrity
from support.manual_loop import ManualLoop

from modelserver.config.schema import ModelDynamicBatching, ModelQueuePolicy, TimeoutAction
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import CancelledError, UnavailableError
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.parked_workers import WaitingThread
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason
from tests.support.manual_clock import ManualClock


class Scene:
    """A batcher with some parked workers."""

    def __init__(self, num_seats: int = 2, max_batch_size: int = 4, **fields: Any) -> None:
        self.clock = ManualClock(1000)
        self.statistics = ModelStatistics()
        config = batching_config(max_batch_size, dynamic_batching=ModelDynamicBatching(**fields))
        self.loop = ManualLoop(self.clock)
        self.batcher = Batcher(
            config, loop=self.loop, statistics=self.statistics, clock=self.clock, default_max_queue_size=50
        )
        self.workers = [WaitingThread() for _ in range(num_seats)]
        for worker in self.workers:
            self.take(worker)

    def submit(self, num_requests: int = 1, rows: int = 1) -> list[InFlightRequest]:
        requests = [request(rows) for _ in range(num_requests)]
        for each in requests:
            self.batcher.submit(each)
        return requests

    def take(self, worker: WaitingThread) -> int:
        """Requests in the batch that the worker gets."""
        batch, _ = self.batcher.try_take(worker)
        check_integrity(self.batcher)
        return len(batch.requests) if batch is not None else 0

    @property
    def woken(self) -> list[bool]:
        check_integrity(self.batcher)
        return [worker.is_woken for worker in self.workers]


def test_a_burst_wakes_one_worker_and_that_one_the_next() -> None:
    scene = Scene(num_seats=3)
    scene.submit(6)
    assert scene.woken == [False, False, True]
    assert scene.take(scene.workers[2]) == 4
    assert scene.woken == [False, True, False]
    assert scene.take(scene.workers[1]) == 2
    assert scene.woken == [False, False, False]


def test_a_thread_is_woken_once_after_the_turn_and_takes_all_that_it_brought() -> None:
    scene = Scene()
    scene.loop.turn = []
    scene.submit(3)
    assert len(scene.loop.turn) == 1
    assert not any(worker.is_woken for worker in scene.workers)
    scene.loop.end_turn()
    assert scene.woken == [False, True]
    assert scene.take(scene.workers[1]) == 3


def test_nobody_is_woken_for_what_another_worker_has_taken_before_the_turn_ended() -> None:
    scene = Scene()
    scene.loop.turn = []
    scene.submit()
    assert scene.take(scene.workers[0]) == 1
    scene.loop.end_turn()
    assert scene.woken == [False, False]
    scene.submit()
    assert scene.woken == [False, True]


def test_during_a_queue_delay_one_worker_watches_and_only_a_full_batch_wakes_it() -> None:
    scene = Scene(max_queue_delay_microseconds=100)
    scene.submit()
    assert scene.woken == [False, True]
    assert scene.take(scene.workers[1]) == 0
    scene.submit(2)
    assert scene.woken == [False, False]
    scene.submit()
    assert scene.woken == [False, True]
    assert scene.take(scene.workers[1]) == 4


@pytest.mark.parametrize("leaves", [*TimeoutAction, "cancelled"])
def test_a_preferred_size_is_met_when_a_request_leaves_its_place(leaves: TimeoutAction | str) -> None:
    action = leaves if isinstance(leaves, TimeoutAction) else TimeoutAction.REJECT
    policy = ModelQueuePolicy(timeout_action=action, default_timeout_microseconds=100)
    scene = Scene(
        max_batch_size=16,
        preferred_batch_size=(4, 16),
        max_queue_delay_microseconds=1000,
        default_queue_policy=policy,
    )
    (first,) = scene.submit(rows=1)
    scene.take(scene.workers[1])
    scene.clock.advance_us(50)
    scene.submit(2, rows=2)
    assert scene.take(scene.workers[1]) == 0, "1, 2 and 2 rows are no preferred size"
    if leaves == "cancelled":
        first.cancel()
    scene.clock.advance_us(50)
    scene.loop.run_timers()
    assert scene.woken == [False, True]
    assert scene.take(scene.workers[1]) == 2
    assert scene.batcher.queue_depth == (1 if leaves is TimeoutAction.DELAY else 0)


def test_another_worker_watches_what_the_watcher_leaves() -> None:
    scene = Scene(max_queue_delay_microseconds=100)
    scene.submit()
    scene.take(scene.workers[1])
    scene.submit(5)
    assert scene.take(scene.workers[1]) == 4
    assert scene.woken == [True, False]
    assert scene.take(scene.workers[0]) == 0
    scene.clock.advance_us(100)
    assert scene.take(scene.workers[0]) == 2


def test_a_woken_seat_that_closes_wakes_another() -> None:
    scene = Scene()
    scene.submit()
    scene.batcher.close_worker(scene.workers[1])
    assert scene.take(scene.workers[1]) == 0
    assert scene.workers[1].is_left
    assert scene.woken == [True, False]
    assert scene.take(scene.workers[0]) == 1


def test_closing_a_sleeping_seat_wakes_it_and_no_one_else_is_kept_from_waking() -> None:
    scene = Scene()
    scene.batcher.close_worker(scene.workers[0])
    assert scene.workers[0].is_woken
    assert scene.take(scene.workers[0]) == 0
    scene.submit()
    assert scene.woken == [False, True]


def test_abort_answers_what_is_queued_and_refuses_the_rest() -> None:
    scene = Scene(num_seats=0)
    answers: list[InferResponse] = []
    for each in scene.submit(2):
        each.stream.subscribe(answers.append)
    error = UnavailableError("gone")
    scene.batcher.abort(error)
    assert [answer.error for answer in answers] == [error, error]
    assert scene.batcher.inflight == scene.batcher.queue_depth == 0
    with pytest.raises(UnavailableError, match="'m' is being unloaded"):
        scene.submit()
    assert scene.statistics.snapshot().failures[FailureReason.OTHER] == 3


def test_a_request_that_is_already_cancelled_is_refused() -> None:
    scene = Scene()
    cancelled = request()
    cancelled.cancel()
    with pytest.raises(CancelledError):
        scene.batcher.submit(cancelled)
    assert scene.batcher.inflight == 0
    assert scene.statistics.snapshot().failures[FailureReason.CANCELED] == 1


def test_a_full_queue_says_what_and_where() -> None:
    scene = Scene(num_seats=0, priority_levels=2, default_priority_level=2)
    scene.submit(50)
    with pytest.raises(
        UnavailableError, match=r"^Exceeds maximum queue size: model 'm' already has 50 .* level 2; .* --max-queue-size"
    ):
        scene.submit()


def test_idle_is_told_when_the_last_answer_is_delivered() -> None:
    scene = Scene(num_seats=0)
    first, second = scene.submit(2)
    told: list[int] = []
    scene.batcher.on_idle = lambda: told.append(scene.batcher.inflight)
    scene.batcher.deliver([(first, InferResponse())])
    assert told == []
    scene.batcher.deliver([(second, InferResponse(is_final=False)), (second, InferResponse())])
    assert told == [0]


def test_a_worker_that_may_not_take_passes_its_wake_on() -> None:
    scene = Scene(num_seats=1)
    away = WaitingThread()
    scene.take(away)  # parked, before what it works for failed
    scene.submit()
    assert away.is_woken
    scene.batcher.pass_on(away)
    assert scene.workers[0].is_woken
    assert scene.take(scene.workers[0]) == 1
    assert scene.submit()
    assert not away.is_parked
    scene.batcher.close_worker(away)
    scene.batcher.pass_on(away)
    assert away.is_left


def test_queue_and_compute_start_count_from_the_clock() -> None:
    scene = Scene(num_seats=0)
    [sent] = scene.submit()
    scene.clock.advance_us(5)
    batch, _ = scene.batcher.try_take(WaitingThread())
    assert batch is not None
    assert sent.arrival_ns == batch.enqueue_ns[0] == 1000
    assert batch.taken_ns == 6000
