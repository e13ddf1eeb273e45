"""Who would be late is refused at once, by how fast the queue has emptied; and who is refused hears when to return."""

from __future__ import annotations

import pytest
from support.batching import batching_config, request
from support.integrity import check_integrity
from support.manual_loop import ManualLoop

from modelserver.config.schema import ModelDynamicBatching, ModelQueuePolicy, TimeoutAction
from modelserver.core.request import InFlightRequest
from modelserver.errors import QueueFullError
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.parked_workers import WaitingThread
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason
from tests.support.manual_clock import ManualClock

MS = 1_000_000


class Model:
    """A model of 10 ms per request, as its queue sees it."""

    def __init__(
        self, policy: ModelQueuePolicy, *, is_fair: bool = False, is_adaptive: bool = True, num_levels: int = 0
    ) -> None:
        self.clock = ManualClock(1000)
        self.statistics = ModelStatistics()
        batching = ModelDynamicBatching(
            priority_levels=num_levels, default_priority_level=num_levels, default_queue_policy=policy
        )
        self.batcher = Batcher(
            batching_config(1, dynamic_batching=batching),
            loop=ManualLoop(self.clock),
            statistics=self.statistics,
            clock=self.clock,
            is_fair=is_fair,
            is_adaptive=is_adaptive,
        )
        self.worker = WaitingThread()

    def submit(self, *, deadline_ms: int | None = None, caller: str = "", priority: int = 0) -> InFlightRequest:
        made = request(priority=priority)
        made.caller = caller
        if deadline_ms is not None:
            made.deadline_ns = self.clock.now_ns() + deadline_ms * MS
        self.batcher.submit(made)
        return made

    def serve(self, number: int) -> None:
        for _ in range(number):
            batch, _ = self.batcher.try_take(self.worker)
            assert batch is not None
            check_integrity(self.batcher)
            self.clock.advance_us(10_000)
            self.batcher.inflight -= 1

    def warm(self, num_left: int) -> None:
        """Let it show how fast it is, and leave so many in the queue."""
        for _ in range(num_left + 10):
            self.submit()
        self.serve(10)

    def refusal(self, **details: object) -> QueueFullError:
        with pytest.raises(QueueFullError, match="cannot answer in time") as caught:
            self.submit(**details)  # type: ignore[arg-type]
        return caught.value


def test_a_deadline_that_the_queue_outlasts_is_refused() -> None:
    model = Model(ModelQueuePolicy())
    model.warm(5)
    assert model.refusal(deadline_ms=40).retry_after_s == pytest.approx(0.05, abs=0.01)
    model.submit(deadline_ms=80)
    model.submit()
    assert model.statistics.snapshot().failures[FailureReason.REJECTED] == 1


@pytest.mark.parametrize("is_fair", [False, True])
def test_priority_levels_cost_nothing_by_their_number(is_fair: bool) -> None:
    model = Model(ModelQueuePolicy(), num_levels=2**64 - 1, is_fair=is_fair)
    model.warm(5)
    model.refusal(deadline_ms=40)
    model.refusal(deadline_ms=40, priority=2**64 - 1)
    model.submit(deadline_ms=40, priority=2**32)


def test_a_timeout_is_about_the_queue_alone() -> None:
    model = Model(ModelQueuePolicy(default_timeout_microseconds=205_000))
    for _ in range(15):
        model.submit()
    model.serve(8)
    for _ in range(14):
        model.submit()
    assert model.refusal().retry_after_s


def test_nobody_is_refused_before_anything_is_known() -> None:
    model = Model(ModelQueuePolicy())
    for _ in range(50):
        model.submit(deadline_ms=1)


def test_without_the_flag_the_queue_is_fifo_and_patient() -> None:
    model = Model(ModelQueuePolicy(), is_adaptive=False)
    model.warm(20)
    model.submit(deadline_ms=1)


def test_what_may_be_late_is_not_refused() -> None:
    model = Model(ModelQueuePolicy(default_timeout_microseconds=10_000, timeout_action=TimeoutAction.DELAY))
    model.warm(5)
    model.submit()


def test_a_caller_with_little_in_the_queue_is_not_late() -> None:
    model = Model(ModelQueuePolicy(), is_fair=True)
    for _ in range(30):
        model.submit(caller="hog")
    model.serve(10)
    model.refusal(caller="hog", deadline_ms=60)
    model.submit(caller="guest", deadline_ms=60)


def test_a_full_queue_says_when_it_will_be_empty() -> None:
    model = Model(ModelQueuePolicy(max_queue_size=20))
    for _ in range(20):
        model.submit()
    model.serve(10)
    for _ in range(10):
        model.submit()
    with pytest.raises(QueueFullError, match="Exceeds maximum queue size") as caught:
        model.submit()
    assert caught.value.retry_after_s == pytest.approx(0.2, abs=0.03)
