"""Streams that were answered while the client was still sending: when it is told to stop, and when not."""

from __future__ import annotations

import asyncio

import pytest
from support.http2_frames import ErrorCode, Frame, FrameType, data, headers, rst_stream
from support.memory_http2 import MemoryPeer, until
from support.raw_http2 import call_fields

from modelserver.wire.limits import TimeLimits, WireLimits

SOON = WireLimits(times=TimeLimits(linger_s=0.05))


def answered_early(limits: WireLimits | None = None) -> MemoryPeer:
    """A call of a method that there is not is answered as soon as it begins."""
    peer = MemoryPeer(limits)
    peer.open(1, "Nothing")
    assert peer.answer(1).grpc_status == 12
    assert not peer.resets
    return peer


@pytest.mark.parametrize(
    "end", [data(1, b"", end=True), data(1, bytes(100), end=True), headers(1, [("x", "y")]), rst_stream(1)]
)
async def test_who_ends_is_not_reset(end: Frame) -> None:
    peer = answered_early(SOON)
    peer.send(end)
    await asyncio.sleep(0.1)
    peer.read()
    assert not peer.resets
    assert not peer.goaways


async def test_who_goes_on_is_told_to_stop_once() -> None:
    """Not at once: it may have the answer unread before it."""
    peer = answered_early()
    assert not peer.send(data(1, b"more"), data(1, b"and more"))
    await until(lambda: peer.read() is not None and bool(peer.resets))
    peer.send(data(1, b"yet more"), data(1, b"at last", end=True))
    await asyncio.sleep(0.1)
    assert not peer.read()
    assert peer.resets == {1: ErrorCode.NO_ERROR}
    assert not peer.goaways


async def test_who_says_nothing_is_told_to_stop_in_the_end() -> None:
    peer = answered_early(SOON)
    await asyncio.sleep(0.03)
    peer.open(3, "Nothing")
    await until(lambda: peer.read() is not None and bool(peer.resets))
    assert peer.resets == {1: ErrorCode.NO_ERROR}
    await until(lambda: peer.read() is not None and len(peer.resets) == 2)
    peer.open(5, "Nothing")
    await until(lambda: peer.read() is not None and len(peer.resets) == 3)


async def test_those_that_are_too_many_are_not_waited_for() -> None:
    peer = MemoryPeer()
    for stream_id in range(1, 251, 2):
        peer.open(stream_id, "Nothing")
    assert list(peer.resets) == list(range(1, 51, 2))


async def test_clients_that_reset_what_was_answered_do_no_wrong() -> None:
    peer = MemoryPeer()
    for stream_id in range(1, 4001, 2):
        peer.open(stream_id, "Nothing")
        peer.send(rst_stream(stream_id))
    assert not peer.goaways


async def test_a_lost_connection_waits_for_nobody() -> None:
    peer = answered_early(SOON)
    peer.leave()
    await asyncio.sleep(0.1)
    assert not peer.of_type(FrameType.RST_STREAM)


async def test_other_streams_go_on() -> None:
    peer = answered_early()
    peer.send(headers(3, call_fields("Echo"), end=False), data(1, b"more"))
    peer.send(data(3, b"\0\0\0\0\1x", end=True))
    assert peer.answer(3).messages == [b"x"]
    await until(lambda: peer.read() is not None and bool(peer.resets))
    assert peer.resets == {1: ErrorCode.NO_ERROR}
