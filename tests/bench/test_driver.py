"""Drivers over lanes that a test answers by hand: how many are in flight, what waits, when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic_ns

from modelserver.bench.driver import ClosedDriver, OpenDriver, PeriodicDriver
from modelserver.bench.work import PeriodicLoad
from modelserver.client.lane import Lane
from modelserver.errors import UnavailableError


class HandLane(Lane):
    """Remembers what is sent."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.sent: list[bytes] = []
        self.is_busy = False

    def send(self, request: bytes) -> None:
        assert not self.is_busy, "one request at a time"
        self.is_busy = True
        self.start_ns = self.sent_ns = monotonic_ns()
        self.sent.append(request)

    async def connect(self) -> None:
        """It is ready as it is."""

    def close(self) -> None:
        self.is_busy = False

    def finish(self, failure: str | None = None) -> None:
        self.is_busy = False
        self.answers.answered(self, monotonic_ns(), failure)


class Numbers:
    """A feed of numbers, and a recorder of what became of them."""

    def __init__(self) -> None:
        self.num_fed = 0
        self.recorded: list[tuple[int, int, str | None]] = []
        self.prepared: list[Lane] = []

    def next(self, lane: Lane) -> bytes:
        self.num_fed += 1
        return b"%d" % self.num_fed

    def prepare(self, lane: Lane) -> None:
        self.prepared.append(lane)

    def record(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        self.recorded.append((lane.due_ns, lane.start_ns, failure))


def make_lanes(driver: object, count: int) -> list[HandLane]:
    lanes = [HandLane() for _ in range(count)]
    for index, lane in enumerate(lanes):
        lane.answers = driver  # type: ignore[assignment]
        lane.index = index
    return lanes


async def test_a_closed_load_keeps_every_lane_busy_until_it_stops() -> None:
    numbers = Numbers()
    driver = ClosedDriver(numbers, numbers, num_requests=None)
    lanes = make_lanes(driver, 3)
    driver.begin(list(lanes))
    for _ in range(4):
        for lane in lanes:
            lane.finish()
    assert [len(lane.sent) for lane in lanes] == [5, 5, 5]
    stopping = asyncio.create_task(driver.stop(5))
    await asyncio.sleep(0)
    for lane in lanes:
        lane.finish()
    assert await stopping == 0
    assert len(numbers.recorded) == 15


async def test_a_closed_load_of_so_many_requests_ends_by_itself() -> None:
    numbers = Numbers()
    driver = ClosedDriver(numbers, numbers, num_requests=5)
    lanes = make_lanes(driver, 3)
    driver.begin(list(lanes))
    while any(lane.is_busy for lane in lanes):
        next(lane for lane in lanes if lane.is_busy).finish("bad")
    await driver.wait()
    assert len(numbers.recorded) == 5
    assert {failure for *_, failure in numbers.recorded} == {"bad"}


async def test_what_is_never_answered_is_counted() -> None:
    numbers = Numbers()
    driver = ClosedDriver(numbers, numbers, num_requests=None)
    driver.begin(list(make_lanes(driver, 2)))
    assert await driver.stop(0.01) == 2


def open_driver(numbers: Numbers, due: list[int], grow: Callable[[], asyncio.Task[Lane]] | None = None) -> OpenDriver:
    return OpenDriver(numbers, numbers, due_times=iter([*due, 2**62]), num_requests=len(due), grow=grow)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (a test's patience)
            await asyncio.sleep(0.001)


async def test_requests_are_sent_when_due_and_never_before() -> None:
    numbers = Numbers()
    now_ns = monotonic_ns()
    due = [now_ns + 5_000_000, now_ns + 15_000_000]
    driver = open_driver(numbers, due)
    lanes = make_lanes(driver, 2)
    driver.begin(list(lanes))
    assert not any(lane.is_busy for lane in lanes)
    await until(lambda: all(lane.is_busy for lane in lanes))
    for lane in lanes:
        lane.finish()
    await driver.wait()
    assert sorted(due_ns for due_ns, *_ in numbers.recorded) == due
    assert all(start_ns >= due_ns for due_ns, start_ns, _ in numbers.recorded)
    await driver.stop(1)


async def test_a_request_without_a_free_lane_waits_and_keeps_its_time() -> None:
    numbers = Numbers()
    due = [monotonic_ns() - 3_000_000, monotonic_ns() - 2_000_000, monotonic_ns() - 1_000_000]
    driver = open_driver(numbers, due)
    (lane,) = make_lanes(driver, 1)
    driver.begin([lane])
    await until(lambda: numbers.num_fed == 1)
    for _ in range(3):
        lane.finish()
    await driver.wait()
    assert [due_ns for due_ns, *_ in numbers.recorded] == due
    await driver.stop(1)


async def test_lanes_are_added_for_what_waits_as_long_as_there_may_be_more() -> None:
    numbers = Numbers()
    added: list[HandLane] = []

    def grow() -> asyncio.Task[Lane]:
        if len(added) == 1:
            raise UnavailableError("enough")
        added.extend(make_lanes(driver, 1))

        async def connect() -> Lane:
            return added[-1]

        return asyncio.get_running_loop().create_task(connect())

    driver = open_driver(numbers, [monotonic_ns() - 1] * 3, grow)
    (lane,) = make_lanes(driver, 1)
    driver.begin([lane])
    await until(lambda: bool(added) and added[0].is_busy)
    assert numbers.prepared == [lane, added[0]]
    lane.finish()
    assert lane.is_busy
    lane.finish()
    added[0].finish()
    await driver.wait()
    await driver.stop(1)


async def test_a_periodic_load_begins_more_when_the_last_ones_have_had_enough() -> None:
    numbers = Numbers()
    driver = PeriodicDriver(numbers, numbers, PeriodicLoad(first=1, total=4, step=2, period=2))
    lanes = make_lanes(driver, 4)
    driver.begin(list(lanes))
    assert [lane.is_busy for lane in lanes] == [True, False, False, False]
    lanes[0].response_times.append(1)
    driver.responded(lanes[0])
    assert not lanes[1].is_busy
    lanes[0].response_times.append(2)
    driver.responded(lanes[0])
    assert [lane.is_busy for lane in lanes] == [True, True, True, False]
    # Those that ended early have had enough, too.
    lanes[1].finish()
    lanes[2].finish()
    assert lanes[3].is_busy
    lanes[0].finish()
    lanes[3].finish()
    await driver.wait()
    assert len(numbers.recorded) == 4
