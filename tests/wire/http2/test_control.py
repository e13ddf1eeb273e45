"""Control frames of the peer."""

from __future__ import annotations

import struct

import pytest
from support.http2_frames import (
    ErrorCode,
    Frame,
    FrameType,
    Setting,
    goaway,
    headers,
    ping,
    priority,
    push_promise,
    rst_stream,
    settings,
    settings_ack,
    window_update,
)
from support.memory_http2 import MemoryPeer
from support.raw_http2 import call_fields

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.limits import Http2Limits, WireLimits

CALM = ErrorCode.ENHANCE_YOUR_CALM


async def test_pings_come_back() -> None:
    peer = MemoryPeer()
    (answer,) = peer.send(ping(b"abcdefgh"))
    assert (answer.type, answer.is_ack, answer.payload) == (FrameType.PING, True, b"abcdefgh")


async def test_each_settings_is_acknowledged_once() -> None:
    peer = MemoryPeer()
    frames = peer.send(settings({4: 1}), settings({Setting.MAX_FRAME_SIZE: 20_000}))
    assert [(frame.type, frame.is_ack) for frame in frames] == [(FrameType.SETTINGS, True)] * 2


async def test_what_needs_no_answer_has_none() -> None:
    peer = MemoryPeer()
    peer.call(1, "Hold")
    harmless = [
        ping(ack=True),
        goaway(),
        priority(9),
        window_update(0, 5),
        window_update(1, 5),
        Frame(0x55, 1, 3, b"?"),
    ]
    assert not peer.send(*harmless)
    peer.leave()


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (settings_ack(), ErrorCode.PROTOCOL_ERROR),
        (window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
        (window_update(0, (1 << 31) - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (window_update(9, 1), ErrorCode.PROTOCOL_ERROR),
        (Frame(FrameType.WINDOW_UPDATE, 0, 0, b"\0\0\1"), ErrorCode.FRAME_SIZE_ERROR),
        (rst_stream(9), ErrorCode.PROTOCOL_ERROR),
        (Frame(FrameType.RST_STREAM, 0, 1, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
        (priority(3, depends_on=3), ErrorCode.PROTOCOL_ERROR),
        (Frame(FrameType.PRIORITY, 0, 3, b"\0\0\0\0"), ErrorCode.FRAME_SIZE_ERROR),
        (Frame(FrameType.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (Frame(FrameType.PING, 0, 0, b"short"), ErrorCode.FRAME_SIZE_ERROR),
        (Frame(FrameType.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (Frame(FrameType.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (Frame(FrameType.SETTINGS, 1, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (Frame(FrameType.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (Frame(FrameType.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (Frame(FrameType.CONTINUATION, 4, 1), ErrorCode.PROTOCOL_ERROR),
        (push_promise(1, 2, [(":path", "/")]), ErrorCode.PROTOCOL_ERROR),
    ],
)
async def test_frames_that_may_not_be(frame: Frame, code: ErrorCode) -> None:
    peer = MemoryPeer()
    peer.open(1, "Echo")
    peer.send(frame)
    ((last, found, text),) = peer.goaways
    assert (last, found) == (1, code)
    assert text
    assert peer.transport.is_closing()
    assert sum(peer.violations.values()) == 1
    peer.leave()


async def test_a_stream_window_that_overflows_costs_its_stream() -> None:
    peer = MemoryPeer()
    peer.call(1, "Hold")
    peer.send(window_update(1, (1 << 31) - 1))
    assert peer.resets == {1: ErrorCode.FLOW_CONTROL_ERROR}
    assert peer.grpc.num_cancelled == 1
    peer.call(3, "Echo", b"x")
    assert peer.answer(3).messages == [b"x"]


async def test_too_many_resets() -> None:
    limits = WireLimits(http2=Http2Limits(resets_burst=5, resets_per_s=0))
    peer = MemoryPeer(limits)
    for index in range(6):
        assert not peer.goaways
        peer.send(headers(2 * index + 1, call_fields("Hold"), end=False), rst_stream(2 * index + 1))
    assert peer.goaways == [(11, CALM, b"too_many_resets")]
    assert peer.violations == {Violation.TOO_MANY_RESETS: 1}


async def test_streams_that_we_reset_count_too() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(resets_burst=5, resets_per_s=0)))
    for index in range(6):
        peer.send(headers(2 * index + 1, [(":method", "GET")]))
    assert peer.goaways == [(11, CALM, b"too_many_resets")]


async def test_too_many_glitches() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(glitches_burst=10, glitches_per_s=0)))
    peer.send(*[priority(2 * index + 1) for index in range(10)])
    assert not peer.goaways
    peer.send(Frame(0x55))
    assert peer.goaways == [(0, CALM, b"too_many_glitches")]


async def test_too_many_answers_in_one_turn() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(max_control_frames=10)))
    for _ in range(3):
        peer.send(*[settings()] * 10)
    assert not peer.goaways
    peer.send(*[settings()] * 11)
    assert peer.goaways == [(0, CALM, b"too_many_control_frames")]


async def test_too_many_answers_that_the_peer_does_not_take() -> None:
    peer = MemoryPeer(WireLimits(http2=Http2Limits(max_control_frames=10)))
    peer.connection.pause_writing()
    for _ in range(11):
        peer.send(settings())
    assert peer.goaways == [(0, CALM, b"too_many_control_frames")]


async def test_too_many_pings() -> None:
    peer = MemoryPeer()
    for _ in range(3):
        peer.send(ping())
        assert not peer.goaways
    peer.send(ping())
    assert peer.goaways == [(0, CALM, b"too_many_pings")]


@pytest.mark.parametrize("method", ["Echo", "Fail", "Chat"])
async def test_pings_between_answers_are_no_offence(method: str) -> None:
    """Clients measure the bandwidth with them."""
    peer = MemoryPeer()
    for index in range(20):
        peer.call(2 * index + 1, method, b"9 x")
        await peer.settle()
        peer.send(ping())
    assert not peer.transport.is_closing()
    peer.leave()


async def test_too_many_settings_in_one_frame() -> None:
    peer = MemoryPeer()
    peer.send(Frame(FrameType.SETTINGS, 0, 0, struct.pack(">HI", 0x99, 0) * 33))
    assert peer.goaways == [(0, CALM, b"too_many_settings")]
