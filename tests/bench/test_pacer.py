"""Being woken in time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from time import monotonic_ns

import pytest

from modelserver.bench.driver import LoopPacer, Pacer, TimerPacer, make_pacer

KINDS = [LoopPacer, *([TimerPacer] if sys.platform == "linux" else [])]


@pytest.mark.parametrize("kind", KINDS)
async def test_it_fires_once_and_not_early(kind: Callable[[Callable[[], None]], Pacer]) -> None:
    fired: list[int] = []
    pacer = kind(lambda: fired.append(monotonic_ns()))
    due_ns = monotonic_ns() + 20_000_000
    pacer.arm(due_ns)
    async with asyncio.timeout(60):
        while not fired:  # noqa: ASYNC110  (a test's patience)
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    pacer.close()
    assert len(fired) == 1
    # The timers of a loop are rounded to its clock's resolution.
    assert fired[0] >= due_ns - 1_000_000


@pytest.mark.parametrize("kind", KINDS)
async def test_a_time_in_the_past_fires_at_once(kind: Callable[[Callable[[], None]], Pacer]) -> None:
    fired = asyncio.Event()
    pacer = kind(fired.set)
    pacer.arm(1)
    async with asyncio.timeout(60):
        await fired.wait()
    pacer.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_arming_again_replaces_the_time(kind: Callable[[Callable[[], None]], Pacer]) -> None:
    fired: list[int] = []
    pacer = kind(lambda: fired.append(1))
    pacer.arm(monotonic_ns() + 5_000_000)
    pacer.arm(monotonic_ns() + 3_600_000_000_000)
    await asyncio.sleep(0.03)
    pacer.close()
    assert not fired


async def test_linux_has_exact_timers() -> None:
    pacer = make_pacer(lambda: None)
    assert isinstance(pacer, TimerPacer if sys.platform == "linux" else LoopPacer)
    pacer.close()
