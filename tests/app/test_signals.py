"""The two signals as events, and work that ends early when one is set."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from modelserver.app.shutdown import SAME_REQUEST_S, StopSignals, unless


async def test_the_first_signal_asks_and_the_second_forces() -> None:
    before = signal.getsignal(signal.SIGTERM)
    now_s, asked = 100.0, asyncio.Event()

    def ask_for_time() -> float:
        asked.set()
        return now_s

    with StopSignals(ask_for_time) as signals:
        for later_s, number, is_forced in (
            (0.0, signal.SIGTERM, False),
            (SAME_REQUEST_S, signal.SIGTERM, False),  # the same request, passed on by a parent
            (0.001, signal.SIGINT, True),
        ):
            now_s += later_s
            asked.clear()
            os.kill(os.getpid(), number)
            await asyncio.wait_for(asked.wait(), 60)
            assert (signals.stop.is_set(), signals.force.is_set()) == (True, is_forced)
    assert signal.getsignal(signal.SIGTERM) == before


async def test_a_closing_terminal_asks_too_but_not_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup themselves
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(signals.stop.wait(), 60)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_work_that_ends_by_itself_is_done() -> None:
    assert await unless(asyncio.Event(), asyncio.sleep(0))


async def test_work_is_cancelled_by_the_event_and_has_cleaned_up_on_return() -> None:
    event = asyncio.Event()
    cleaned_up = False

    async def work() -> None:
        nonlocal cleaned_up
        event.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up = True

    assert not await unless(event, work())
    assert cleaned_up


async def test_an_error_of_the_work_passes_through() -> None:
    async def work() -> None:
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        await unless(asyncio.Event(), work())


async def test_an_error_while_being_cancelled_passes_through_too() -> None:
    event = asyncio.Event()

    async def work() -> None:
        event.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("clean-up failed")

    with pytest.raises(ValueError, match="clean-up failed"):
        await unless(event, work())
