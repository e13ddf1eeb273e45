"""Which of several instances gets a request that any could take: one that knows its beginning, or has less to do."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import numpy as np
from support.batching import batching_config, request
from support.integrity import check_integrity
from support.manual_clock import ManualClock
from support.manual_loop import ManualLoop

from modelserver.core.datatype import Datatype
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.core.tensor import Tensor
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.parked_workers import WaitingThread
from modelserver.scheduling.places import PATIENCE_NS, Places
from modelserver.telemetry.statistics import ModelStatistics

LONG = "You are a helpful assistant. " * 60


class SteppingThread(WaitingThread):
    """Woken at once, as the workers of instances that go in steps are."""

    wakes_after_turn = False


class Scene:
    """A batcher whose workers are parked."""

    def __init__(self, num_workers: int = 2, *, is_fair: bool = False) -> None:
        self.clock = ManualClock(1000)
        self.loop = ManualLoop(self.clock)
        self.batcher = Batcher(
            batching_config(0),
            loop=self.loop,
            statistics=ModelStatistics(),
            clock=self.clock,
            places=Places(("messages", "IN", "numbers")),
            is_fair=is_fair,
        )
        self.workers = [SteppingThread() for _ in range(num_workers)]
        for worker in self.workers:
            assert self.take(worker) is None

    def submit(self, text: str | None = None, numbers: Sequence[int] = (), caller: str = "") -> InFlightRequest:
        made = request()
        made.caller = caller
        if text is not None:
            made.inputs = {"messages": Tensor("messages", Datatype.BYTES, np.array([text.encode()], object))}
        elif numbers:
            made.inputs = {"numbers": Tensor("numbers", Datatype.INT32, np.array(numbers, np.int32))}
        self.batcher.submit(made)
        return made

    def take(self, worker: WaitingThread) -> InFlightRequest | None:
        batch, _ = self.batcher.try_take(worker)
        check_integrity(self.batcher)
        return batch.requests[0] if batch is not None else None

    def place_of(self, made: InFlightRequest) -> int:
        """Which worker was woken for a request and takes it; it is parked again."""
        (woken,) = (number for number, worker in enumerate(self.workers) if worker.is_woken)
        assert self.take(self.workers[1 - woken]) is None, "it is not for the other"
        assert self.take(self.workers[woken]) is made
        assert self.take(self.workers[woken]) is None
        return woken

    def finish(self, *requests: InFlightRequest) -> None:
        self.batcher.deliver([(each, InferResponse()) for each in requests])


def test_the_one_with_less_to_do_gets_the_next() -> None:
    scene = Scene()
    first, second = scene.submit(), scene.submit()
    assert all(worker.is_woken for worker in scene.workers)
    assert {scene.take(worker) for worker in scene.workers} == {first, second}
    assert [scene.take(worker) for worker in scene.workers] == [None, None]
    scene.finish(first, second)
    places = [scene.place_of(scene.submit()) for _ in range(6)]
    assert places in ([0, 1] * 3, [1, 0] * 3)


def test_beginnings_that_are_known_lead_to_where_they_are_known() -> None:
    for shared in ({"text": LONG}, {"numbers": list(range(2000))}):
        scene = Scene()
        begun = scene.submit(**shared)
        known = scene.place_of(begun)
        other = scene.place_of(scene.submit("short"))
        assert other == 1 - known
        scene.finish(begun)
        for index in range(4):  # with others in turn, so that the place is the busier one now and then
            longer = {name: value + ("?" if name == "text" else [index]) for name, value in shared.items()}
            made = scene.submit(**longer)
            assert scene.place_of(made) == known
            scene.finish(made)


def test_a_place_that_is_much_busier_is_passed_over() -> None:
    scene = Scene()
    asked = [scene.submit(LONG + str(number)) for number in range(8)]
    taken: list[list[InFlightRequest]] = [[], []]
    for number, worker in enumerate(scene.workers):
        while (found := scene.take(worker)) is not None:
            taken[number].append(found)
    assert sorted(map(len, taken)) in ([3, 5], [4, 4])
    scene.finish(*asked)
    assert not scene.batcher.inflight


def test_what_a_place_does_not_fetch_is_anyones() -> None:
    scene = Scene()
    scene.submit()
    (woken,) = (worker for worker in scene.workers if worker.is_woken)
    (other,) = (worker for worker in scene.workers if worker is not woken)
    scene.clock.advance_us(PATIENCE_NS // 1000 - 1)
    assert scene.take(other) is None
    scene.clock.advance_us(1)
    assert scene.take(other) is not None
    assert [scene.take(worker) for worker in scene.workers] == [None, None]
    again = scene.submit()  # the load went with the first
    assert woken.is_woken
    scene.batcher.pass_on(woken)  # its process is being restarted
    assert other.is_woken
    assert scene.take(other) is again


def test_a_worker_that_is_busy_is_helped_after_a_while() -> None:
    scene = Scene()
    first = scene.submit()
    (busy,) = (worker for worker in scene.workers if worker.is_woken)
    (idle,) = (worker for worker in scene.workers if worker is not busy)
    assert scene.take(busy) is first
    second, third = scene.submit(), scene.submit()
    assert scene.take(idle) is second
    asked_ns = scene.clock.now_ns()
    assert scene.batcher.try_take(idle) == (None, asked_ns + PATIENCE_NS)
    scene.clock.advance_us(PATIENCE_NS // 1000)
    assert scene.take(idle) is third


def test_cancelled_requests_and_closed_workers_leave_nothing() -> None:
    scene = Scene(is_fair=True)
    gone = [scene.submit(caller=name) for name in "abcd"]
    for each in gone:
        each.cancel()
    assert [scene.take(worker) for worker in scene.workers] == [None, None]
    assert scene.place_of(scene.submit()) in (0, 1)
    leaving = scene.workers[1]
    scene.batcher.close_worker(leaving)
    assert scene.take(leaving) is None
    assert leaving.is_left
    asked = [scene.submit() for _ in range(3)]
    assert [scene.take(scene.workers[0]) for _ in asked] == asked
    kept = weakref.ref(leaving)
    scene.workers.remove(leaving)
    del leaving
    gc.collect()
    assert kept() is None
