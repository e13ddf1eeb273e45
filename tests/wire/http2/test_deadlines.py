"""One timer for all deadlines."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.loops import on_both_loops
from support.memory_http2 import until

from modelserver.wire.http2.deadlines import TICK_NS, DeadlineWheel


class Call:
    def __init__(self, name: str = "", expired: list[str] | None = None) -> None:
        self.expired_ns: int | None = None
        self._name = name
        self._expired = expired

    def expire(self) -> None:
        self.expired_ns = time.monotonic_ns()
        if self._expired is not None:
            self._expired.append(self._name)


@on_both_loops
async def test_calls_expire_after_their_deadlines() -> None:
    wheel = DeadlineWheel(asyncio.get_running_loop())
    begun_ns = time.monotonic_ns()
    calls = {Call(): begun_ns + delay_ms * 1_000_000 for delay_ms in (0, 1, 25, 59, 60, 100)}
    for call, deadline_ns in calls.items():
        wheel.add(call, deadline_ns)
    await until(lambda: all(call.expired_ns is not None for call in calls))
    for call, deadline_ns in calls.items():
        assert call.expired_ns is not None
        assert call.expired_ns - deadline_ns >= 0


async def test_what_is_removed_does_not_expire() -> None:
    wheel = DeadlineWheel(asyncio.get_running_loop())
    gone, there = Call(), Call()
    soon_ns = time.monotonic_ns() + 1
    for call in (gone, there):
        wheel.add(call, soon_ns)
    wheel.remove(gone, soon_ns)
    wheel.remove(gone, soon_ns)
    await until(lambda: there.expired_ns is not None)
    assert gone.expired_ns is None


@pytest.mark.parametrize("others_ns", [3_600_000_000_000, -2 * TICK_NS])
async def test_a_call_that_expires_may_add_and_remove_others(others_ns: int) -> None:
    """Those that are late too, when the loop is late itself."""
    wheel = DeadlineWheel(asyncio.get_running_loop())
    expired: list[str] = []
    later, removed = Call("later", expired), Call("removed", expired)

    class Busy(Call):
        def expire(self) -> None:
            super().expire()
            wheel.add(later, time.monotonic_ns())
            wheel.remove(removed, removed_ns)

    now_ns = time.monotonic_ns()
    removed_ns = now_ns + others_ns
    wheel.add(Busy("busy", expired), now_ns - 9 * TICK_NS)
    wheel.add(removed, removed_ns)
    await until(lambda: "later" in expired)
    assert expired == ["busy", "later"]


async def test_there_are_no_ticks_while_nothing_waits() -> None:
    loop = asyncio.get_running_loop()
    wheel = DeadlineWheel(loop)
    call = Call()
    deadline_ns = time.monotonic_ns() + 3_600_000_000_000
    wheel.add(call, deadline_ns)
    wheel.remove(call, deadline_ns)
    await asyncio.sleep(0.05)
    assert not [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]


async def test_a_near_deadline_does_not_wait_for_a_far_one() -> None:
    wheel = DeadlineWheel(asyncio.get_running_loop())
    expired: list[str] = []
    begun_ns = time.monotonic_ns()
    wheel.add(Call("far", expired), begun_ns + 3_600_000_000_000)
    wheel.add(Call("nearer", expired), begun_ns + 1_800_000_000_000)
    wheel.add(Call("near", expired), begun_ns + 1_000_000)
    await until(lambda: bool(expired))
    assert expired == ["near"]
