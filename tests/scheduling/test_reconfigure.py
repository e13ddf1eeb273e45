"""A batcher that follows another config while requests wait."""

from __future__ import annotations

from typing import Any

import pytest
from support.batching import batching_config, request
from support.integrity import check_integrity
from support.manual_loop import ManualLoop

from modelserver.config.schema import ModelConfig, ModelDynamicBatching, ModelQueuePolicy, TimeoutAction
from modelserver.core.request import InFlightRequest
from modelserver.errors import UnavailableError
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.parked_workers import WaitingThread
from modelserver.telemetry.statistics import ModelStatistics
from tests.support.manual_clock import ManualClock

US = 1000


def config_of(max_batch_size: int = 4, **fields: Any) -> ModelConfig:
    return batching_config(max_batch_size, dynamic_batching=ModelDynamicBatching(**fields))


class Scene:
    """A batcher with two parked workers at time 0."""

    def __init__(self, **fields: Any) -> None:
        self.clock = ManualClock(0)
        self.batcher = Batcher(
            config_of(**fields), loop=ManualLoop(self.clock), statistics=ModelStatistics(), clock=self.clock
        )
        self.workers = [WaitingThread(), WaitingThread()]
        for worker in self.workers:
            self.take(worker)

    def submit(self, *requests: InFlightRequest) -> None:
        for each in requests:
            self.batcher.submit(each)

    def take(self, worker: WaitingThread) -> tuple[list[InFlightRequest], int | None]:
        batch, wait_until_ns = self.batcher.try_take(worker)
        check_integrity(self.batcher)
        return (list(batch.requests) if batch is not None else []), wait_until_ns

    def take_woken(self) -> tuple[list[InFlightRequest], int | None]:
        """What the one worker that is awake gets."""
        (worker,) = (worker for worker in self.workers if worker.is_woken)
        return self.take(worker)

    def reconfigure(self, **fields: Any) -> None:
        self.batcher.reconfigure(config_of(**fields))
        check_integrity(self.batcher)


def test_a_shorter_delay_is_watched_at_once() -> None:
    scene = Scene(max_queue_delay_microseconds=1_000_000)
    scene.submit(request())
    assert scene.take_woken() == ([], 1_000_000 * US)
    scene.reconfigure(max_queue_delay_microseconds=100)
    assert scene.take_woken() == ([], 100 * US)


def test_without_a_delay_what_waits_goes() -> None:
    scene = Scene(max_queue_delay_microseconds=1_000_000)
    waiting = [request(), request()]
    scene.submit(*waiting)
    scene.take_woken()
    scene.reconfigure()
    assert scene.take_woken() == (waiting, None)


def test_a_longer_delay_holds_what_waits() -> None:
    scene = Scene(max_queue_delay_microseconds=100)
    scene.submit(request())
    scene.take_woken()
    scene.reconfigure(max_queue_delay_microseconds=200)
    scene.clock.advance_us(150)
    assert scene.take_woken() == ([], 200 * US)


def test_a_new_preferred_size_is_met_by_what_waits() -> None:
    scene = Scene(max_queue_delay_microseconds=100)
    waiting = [request() for _ in range(3)]
    scene.submit(*waiting)
    scene.take_woken()
    scene.reconfigure(max_queue_delay_microseconds=100, preferred_batch_size=(2,))
    assert scene.take_woken()[0] == waiting[:2]


def test_levels_sort_what_waits_anew() -> None:
    scene = Scene(max_queue_delay_microseconds=100)
    late, urgent = request(priority=3), request(priority=1)
    scene.submit(late, urgent)
    scene.reconfigure(priority_levels=3, default_priority_level=2)
    assert scene.take_woken()[0] == [urgent, late]


def test_fewer_levels_let_all_come_in_the_order_of_arrival() -> None:
    scene = Scene(max_queue_delay_microseconds=100, priority_levels=3, default_priority_level=2)
    late, urgent = request(priority=3), request(priority=1)
    scene.submit(late)
    scene.clock.advance_us(1)
    scene.submit(urgent)
    scene.reconfigure()
    assert scene.take_woken()[0] == [late, urgent]


def test_the_queue_size_counts_for_what_comes() -> None:
    scene = Scene(max_queue_delay_microseconds=100)
    scene.submit(request(), request())
    scene.reconfigure(max_queue_delay_microseconds=100, default_queue_policy=ModelQueuePolicy(max_queue_size=1))
    with pytest.raises(UnavailableError, match="already has 1 requests"):
        scene.submit(request())
    assert scene.batcher.queue_depth == 2


def test_what_waits_keeps_the_timeout_that_it_came_with() -> None:
    reject = ModelQueuePolicy(TimeoutAction.REJECT, default_timeout_microseconds=50)
    scene = Scene(max_queue_delay_microseconds=100, default_queue_policy=reject)
    early, later = request(), request()
    scene.submit(early)
    scene.reconfigure(max_queue_delay_microseconds=100)
    scene.submit(later)
    scene.clock.advance_us(60)
    scene.take(scene.workers[0])
    assert scene.batcher.queue_depth == 1
    scene.clock.advance_us(60)
    assert scene.take(scene.workers[0])[0] == [later]


def test_a_stopped_batcher_stays_in_a_hurry() -> None:
    scene = Scene(max_queue_delay_microseconds=100)
    scene.submit(request())
    scene.batcher.stop()
    scene.reconfigure(max_queue_delay_microseconds=100)
    assert len(scene.take_woken()[0]) == 1


def test_a_cancel_finds_its_request_in_the_new_queue() -> None:
    scene = Scene(max_queue_delay_microseconds=100)
    waiting = request(priority=2)
    scene.submit(waiting)
    scene.reconfigure(max_queue_delay_microseconds=100, priority_levels=2, default_priority_level=1)
    waiting.cancel()
    assert (scene.batcher.queue_depth, scene.batcher.inflight) == (0, 0)
