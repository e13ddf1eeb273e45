"""What time does to connections."""

from __future__ import annotations

import pytest
from support.http2_frames import PREFACE, ErrorCode, FrameType, Setting, continuation, data, headers, ping, settings
from support.memory_http2 import MemoryPeer, until
from support.memory_transport import receive
from support.raw_http2 import call_fields, get_fields, prefixed

from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.limits import KeepaliveLimits, TimeLimits, WireLimits


@pytest.mark.parametrize(
    ("sent", "patience_s"),
    [(b"", 10), (PREFACE[:20], 10), (PREFACE, 2), (PREFACE + settings({4: 1}).encode()[:-1], 2)],
)
async def test_a_slow_beginning(sent: bytes, patience_s: float) -> None:
    peer = MemoryPeer(greets=False)
    if sent:
        receive(peer.connection, sent)
    peer.pass_time(patience_s - 0.1)
    assert not peer.goaways
    peer.pass_time(patience_s + 1)
    assert peer.goaways[0][1] == ErrorCode.PROTOCOL_ERROR
    assert b"did not come within" in peer.goaways[0][2]
    assert peer.violations == {Violation.SLOW_HEAD: 1}
    peer.leave()


async def test_a_header_block_that_does_not_go_on() -> None:
    peer = MemoryPeer()
    peer.send(headers(1, b"", end_headers=False))
    peer.pass_time(11)
    assert b"header block of stream 1" in peer.goaways[0][2]
    peer.leave()


async def test_a_header_block_that_is_complete_has_time() -> None:
    peer = MemoryPeer()
    peer.send(headers(1, b"", end_headers=False), continuation(1, headers(1, call_fields("Hold")).payload))
    peer.pass_time(11)
    assert not peer.goaways
    peer.leave()


async def test_a_call_that_does_not_go_on() -> None:
    peer = MemoryPeer()
    peer.open(1, "Echo")
    peer.send(data(1, b"\0\0"))
    peer.pass_time(29)
    assert not peer.answer(1).has_ended
    peer.pass_time(31)
    assert peer.answer(1).grpc_status == 4
    assert "too slowly" in peer.answer(1).grpc_message
    peer.send(data(1, b"\0"))
    await until(lambda: peer.read() is not None and bool(peer.resets))
    assert peer.resets == {1: ErrorCode.NO_ERROR}
    assert peer.violations == {Violation.SLOW_BODY: 1}
    peer.leave()


async def test_an_http_request_that_does_not_go_on() -> None:
    peer = MemoryPeer()
    peer.send(headers(1, get_fields("/echo", method="POST"), end=False), data(1, b"some"))
    peer.pass_time(31)
    assert peer.answer(1).status == 408
    peer.leave()


async def test_a_body_that_trickles() -> None:
    """It never pauses for long, and would take for ever."""
    peer = MemoryPeer()
    peer.open(1, "Echo")
    now_s = peer.context.loop.time()
    for second in range(62):
        peer.send(data(1, prefixed(bytes(1000), length=100_000) if not second else bytes(500)))
        peer.connection.sweep(now_s + second)
    peer.read()
    assert peer.answer(1).grpc_status == 4
    peer.leave()


async def test_bytes_of_a_large_frame_are_progress() -> None:
    peer = MemoryPeer()
    peer.open(1, "Sum")
    body = data(1, prefixed(bytes(400_000))).encode()
    now_s = peer.context.loop.time()
    for second in range(100):
        receive(peer.connection, body[second * 4000 : (second + 1) * 4000])
        peer.connection.sweep(now_s + second)
    assert not peer.read()
    peer.leave()


async def test_calls_that_run_have_time() -> None:
    peer = MemoryPeer()
    peer.call(1, "Hold")
    peer.open(3, "Chat")
    peer.pass_time(3000)
    assert not peer.frames
    peer.leave()


async def test_an_answer_that_the_client_leaves_no_window_for() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 0})
    peer.call(1, "Size", b"100")
    peer.pass_time(59)
    assert not peer.resets
    peer.pass_time(61)
    assert peer.resets == {1: ErrorCode.CANCEL}
    assert peer.violations == {Violation.SLOW_READER: 1}
    peer.leave()


async def test_a_peer_that_takes_nothing_at_all() -> None:
    peer = MemoryPeer()
    peer.transport.is_slow = True
    peer.call(1, "Echo", b"x")
    now_s = peer.context.loop.time()
    peer.connection.sweep(now_s)
    peer.transport.num_buffered -= 1
    peer.connection.sweep(now_s + 59)
    peer.connection.sweep(now_s + 118)
    assert not peer.transport.is_closing()
    peer.connection.sweep(now_s + 120)
    assert peer.transport.is_closing()
    assert peer.violations == {Violation.SLOW_READER: 1}
    peer.leave()


async def test_a_silent_peer_is_pinged_and_given_up() -> None:
    limits = KeepaliveLimits(ping_after_s=100, ping_timeout_s=20)
    peer = MemoryPeer(WireLimits(keepalive=limits))
    peer.call(1, "Hold")
    peer.pass_time(101)
    (sent,) = peer.of_type(FrameType.PING)
    peer.send(ping(sent.payload, ack=True))
    peer.pass_time(200)
    now_s = peer.context.loop.time()
    peer.connection.sweep(now_s + 221)
    peer.read()
    assert peer.goaways == [(1, ErrorCode.ENHANCE_YOUR_CALM, b"no_ping_answer")]
    peer.leave()


async def test_an_idle_connection_is_closed_gracefully() -> None:
    peer = MemoryPeer()
    peer.pass_time(3599)
    assert not peer.goaways
    peer.pass_time(3601)
    assert peer.goaways[0][1] == ErrorCode.NO_ERROR
    peer.leave()


async def test_an_idle_connection_may_stay_where_that_is_configured() -> None:
    peer = MemoryPeer(WireLimits(times=TimeLimits(http2_idle_s=0)))
    peer.pass_time(1e6)
    assert not peer.goaways
    peer.leave()


async def test_calls_keep_a_connection_from_being_idle() -> None:
    peer = MemoryPeer()
    now_s = peer.context.loop.time()
    for index in range(5):
        peer.call(2 * index + 1, "Echo")
        peer.connection.sweep(now_s + index * 3000)
    assert not [frame for frame in peer.read() if frame.type == FrameType.GOAWAY]
    peer.leave()


async def test_an_old_connection_says_goodbye_and_has_a_grace() -> None:
    limits = KeepaliveLimits(max_age_s=100, max_age_grace_s=0.01)
    peer = MemoryPeer(WireLimits(keepalive=limits))
    peer.call(1, "Hold")
    peer.pass_time(89)
    assert not peer.goaways
    peer.pass_time(111)
    assert peer.goaways[0][1] == ErrorCode.NO_ERROR
    await until(peer.transport.is_closing)
    peer.leave()


async def test_stream_ids_do_not_run_out_unnoticed() -> None:
    peer = MemoryPeer()
    peer.call((1 << 31) - (1 << 29) + 1, "Echo")
    peer.pass_time(1)
    assert peer.goaways[0][1] == ErrorCode.NO_ERROR
    peer.leave()
