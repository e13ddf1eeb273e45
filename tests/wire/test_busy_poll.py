"""How long a loop stays awake after an answer, by its share of the time and by what it has seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from modelserver.execution.process.channel import BusyWait
from modelserver.wire.busy_poll import BusyPoll

TURN_NS = 2_000


class Loop:
    """Its clock goes on by the turns that it makes, and by the time that it sleeps."""

    def __init__(self, percent: int, num_cores: int = 2, woken_ns: int = 0) -> None:
        self.woken_ns = woken_ns
        self.now_ns = 1_000_000
        self.looked_ns = 0
        self.calls: list[Callable[[], None]] = []
        wait = BusyWait(50, num_cores=num_cores, now_ns=self.clock, let_go=lambda: None)
        self.busy_poll = BusyPoll(cast(Any, self), percent, busy_wait=wait, now_ns=self.clock)

    def clock(self) -> int:
        return self.now_ns

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.calls.append(callback)

    def answer(self, gap_ns: int) -> bool:
        """A request is answered, and the next one comes after so long; whether the loop was awake then."""
        self.busy_poll.expect(self.woken_ns)
        end_ns = self.now_ns + gap_ns
        while self.calls and self.now_ns < end_ns:
            self.now_ns += TURN_NS
            self.looked_ns += TURN_NS
            if self.now_ns < end_ns:
                self.calls.pop()()
        is_awake = bool(self.calls)
        self.now_ns = max(self.now_ns, end_ns)
        return is_awake

    def turn(self) -> None:
        """The turn in which the request came goes on after it was answered."""
        if self.calls:
            self.calls.pop()()


def _share_awake(loop: Loop, gap_ns: int, num_requests: int = 1000) -> float:
    num_awake = 0
    for _ in range(num_requests):
        num_awake += loop.answer(gap_ns)
        loop.busy_poll.num_expected += 1  # it comes, and is answered in the next round
        loop.turn()
        loop.busy_poll.num_expected -= 1
    return num_awake / num_requests


def test_it_is_awake_for_a_client_that_sends_again_at_once() -> None:
    loop = Loop(100)
    assert _share_awake(loop, 20_000) > 0.99


@pytest.mark.parametrize("percent", [5, 12, 50])
def test_it_looks_for_its_share_of_the_time_only(percent: int) -> None:
    loop = Loop(percent)
    began_ns = loop.now_ns
    share = _share_awake(loop, 20_000, 5000)
    assert 0 < share < 1
    assert percent / 200 < loop.looked_ns / (loop.now_ns - began_ns) <= percent / 100 + 0.01


@pytest.mark.parametrize("percent", [5, 12])
def test_what_comes_as_soon_as_it_could_be_woken_costs_nothing_of_its_share(percent: int) -> None:
    assert _share_awake(Loop(percent, woken_ns=20_000), 20_000, 5000) > 0.9
    assert _share_awake(Loop(percent, woken_ns=20_000), 45_000, 5000) < 0.5


def test_among_many_clients_it_does_not_look() -> None:
    loop = Loop(100)
    for _ in range(1000):
        loop.answer(0)
        loop.answer(0)
        loop.turn()
    assert loop.looked_ns < 50 * TURN_NS


@pytest.mark.parametrize("gap_ns", [100_000, 5_000_000])
def test_for_clients_that_take_their_time_it_sleeps(gap_ns: int) -> None:
    loop = Loop(100)
    began_ns = loop.now_ns
    assert _share_awake(loop, gap_ns) == 0
    assert loop.looked_ns / (loop.now_ns - began_ns) < 0.01


@pytest.mark.parametrize(("percent", "num_cores"), [(0, 2), (100, 1)])
def test_without_a_share_or_a_core_to_spare_it_never_looks(percent: int, num_cores: int) -> None:
    loop = Loop(percent, num_cores)
    assert _share_awake(loop, 1_000) == 0
    assert loop.looked_ns == 0


async def test_a_loop_that_looks_does_what_comes_and_ends_by_itself() -> None:
    loop = asyncio.get_running_loop()
    clock = iter(range(0, 10**9, TURN_NS)).__next__
    wait = BusyWait(50, num_cores=2, now_ns=clock, let_go=lambda: None)
    busy_poll = BusyPoll(loop, 100, busy_wait=wait, now_ns=clock)
    done = loop.create_future()
    busy_poll.expect(0)
    loop.call_soon(done.set_result, None)
    await done
    for _ in range(3):
        busy_poll.expect(0)
        await asyncio.sleep(0)
    for _ in range(15):
        assert busy_poll._is_looking
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not busy_poll._is_looking


def test_it_receives_from_the_client_that_was_answered_twice_in_a_row() -> None:
    loop = Loop(100)
    tried: list[str] = []

    def come(receive_soon: Callable[[], None]) -> None:
        """A request comes after a while, is answered, and the loop looks for the next one."""
        loop.now_ns += 20_000
        loop.busy_poll.expect(0, receive_soon)
        loop.turn()

    def first() -> None:
        tried.append("first")
        if len(tried) == 3:
            loop.busy_poll.expect(0, first)

    def second() -> None:
        tried.append("second")

    come(first)
    loop.turn()
    assert tried == [], "who was before it may send as well"
    come(first)
    for num_tried in (1, 2, 3, 4):
        loop.now_ns += 10_000
        loop.turn()
        assert tried == ["first"] * num_tried
    come(second)
    loop.turn()
    assert tried == ["first"] * 4


def test_after_a_look_in_vain_nobody_is_kept() -> None:
    loop = Loop(100)
    num_tried = 0

    def receive_soon() -> None:
        nonlocal num_tried
        num_tried += 1

    for _ in range(2):
        loop.now_ns += 20_000
        loop.busy_poll.expect(0, receive_soon)
        loop.turn()
    while loop.calls:
        loop.now_ns += TURN_NS
        loop.turn()
    assert num_tried > 10
    assert loop.busy_poll._last is loop.busy_poll._lone is None


def test_what_may_not_be_spent_is_not_asked_for_at_each_request() -> None:
    loop = Loop(1)
    num_asked = 0

    def clock() -> int:
        nonlocal num_asked
        num_asked += 1
        return loop.now_ns

    wait = BusyWait(50, num_cores=2, now_ns=loop.clock, let_go=lambda: None)
    busy_poll = BusyPoll(cast(Any, loop), 1, busy_wait=wait, now_ns=clock)
    for _ in range(1000):
        busy_poll.expect(0)
    assert num_asked < 30
