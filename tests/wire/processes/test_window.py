"""Credit of a streamed call."""

from __future__ import annotations

import asyncio

import pytest

from modelserver.wire.processes.link import WINDOW_PIECES, Window


async def test_a_sender_waits_until_there_is_room() -> None:
    window = Window()
    for _ in range(WINDOW_PIECES):
        await window.take()
    waiting = asyncio.ensure_future(window.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    window.grant(2)
    await waiting
    await window.take()


async def test_a_sender_that_waits_is_told_that_nobody_reads() -> None:
    window = Window()
    for _ in range(WINDOW_PIECES):
        await window.take()
    waiting = asyncio.ensure_future(window.take())
    await asyncio.sleep(0)
    window.close()
    with pytest.raises(ConnectionResetError):
        await waiting
    with pytest.raises(ConnectionResetError):
        await window.take()


async def test_a_sender_that_gave_up_does_not_take_room() -> None:
    window = Window()
    for _ in range(WINDOW_PIECES):
        await window.take()
    waiting = asyncio.ensure_future(window.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    window.grant(1)
    await window.take()


async def test_a_sender_may_ask_without_waiting() -> None:
    window = Window()
    for _ in range(WINDOW_PIECES):
        assert window.has_room
        assert window.try_take()
    assert not window.has_room
    assert not window.try_take()
    window.grant(1)
    await window.wait()
    assert window.try_take()
    window.close()
    with pytest.raises(ConnectionResetError):
        window.try_take()
