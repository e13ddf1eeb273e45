"""How connections end."""

from __future__ import annotations

import asyncio

import hpack
from support.http2_frames import ErrorCode, FrameType, data, headers, ping, rst_stream, window_update
from support.memory_http2 import MemoryPeer
from support.memory_transport import receive
from support.raw_http2 import call_fields, prefixed

from modelserver.wire.http2.connection import Http2Connection
from modelserver.wire.limits import TimeLimits, WireLimits

LAST = (1 << 31) - 1


def marker(peer: MemoryPeer) -> bytes:
    (sent,) = peer.of_type(FrameType.PING)
    return sent.payload


async def shut_down(peer: MemoryPeer) -> bytes:
    peer.connection.shutdown()
    await peer.settle()
    assert peer.goaways == [(LAST, ErrorCode.NO_ERROR, b"")]
    return marker(peer)


async def test_a_shutdown_has_two_steps() -> None:
    """Between them new calls are still taken: the client may have sent them before it knew."""
    peer = MemoryPeer()
    peer.call(1, "Hold", b"first")
    asked = await shut_down(peer)
    peer.call(3, "Hold", b"second")
    peer.send(ping(asked, ack=True))
    assert peer.goaways == [(3, ErrorCode.NO_ERROR, b"")]
    peer.call(5, "Echo", b"too late")
    peer.send(window_update(5, 1), rst_stream(5))
    assert not peer.frames
    assert not peer.transport.is_closing()
    peer.grpc.release()
    await peer.settle()
    assert peer.answer(1).messages == [b"first"]
    assert peer.answer(3).messages == [b"second"]
    assert peer.transport.is_closing()
    peer.leave()


async def test_a_shutdown_may_be_repeated() -> None:
    peer = MemoryPeer()
    asked = await shut_down(peer)
    peer.connection.shutdown()
    assert not await peer.settle()
    peer.send(ping(asked, ack=True))
    assert peer.transport.is_closing()
    peer.connection.shutdown()
    peer.leave()


async def test_another_ping_is_no_answer_to_ours() -> None:
    peer = MemoryPeer()
    await shut_down(peer)
    peer.send(ping(b"whatever", ack=True))
    assert not peer.goaways
    peer.leave()


async def test_blocks_of_calls_that_come_too_late_are_decoded() -> None:
    peer, encoder = MemoryPeer(), hpack.Encoder()
    peer.call(1, "Hold")
    asked = await shut_down(peer)
    peer.send(ping(asked, ack=True))
    peer.send(headers(3, encoder.encode([*call_fields("Echo"), ("x", "y")])))
    peer.send(headers(5, encoder.encode([*call_fields("Echo"), ("x", "y")])))
    assert not peer.frames
    peer.grpc.release()
    await peer.settle()
    assert peer.answer(1).grpc_status == 0
    peer.leave()


async def test_large_answers_leave_before_the_end() -> None:
    peer = MemoryPeer(announces={4: 1 << 20})
    peer.call(1, "Size", b"500000")
    peer.send(ping(await shut_down(peer), ack=True))
    assert not peer.transport.is_closing()
    peer.send(window_update(0, 1 << 20))
    assert peer.answer(1).messages == [bytes(500_000)]
    assert peer.transport.is_closing()
    peer.leave()


async def test_a_streaming_call_keeps_the_connection_until_its_end() -> None:
    peer = MemoryPeer()
    peer.open(1, "Chat")
    peer.send(ping(await shut_down(peer), ack=True))
    peer.send(data(1, prefixed(b"a"), end=True))
    await peer.settle()
    assert peer.answer(1).messages == [b"a"]
    assert peer.transport.is_closing()
    peer.leave()


async def test_the_end_of_a_lost_connection_leaves_no_timers() -> None:
    peer = MemoryPeer()
    await shut_down(peer)
    peer.leave()
    loop = asyncio.get_running_loop()
    assert not [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
    assert not peer.context.connections


async def test_after_the_last_word_the_connection_lingers_for_the_client_to_close() -> None:
    """What comes meanwhile is dropped, but not without end."""
    peer = MemoryPeer(WireLimits(times=TimeLimits(linger_s=0.01)))
    peer.send(data(0, b"wrong"))
    assert peer.goaways[0][1] == ErrorCode.PROTOCOL_ERROR
    for _ in range(10):
        receive(peer.connection, bytes(50_000))
    assert not peer.read()
    peer.leave()


async def test_a_fault_cancels_what_runs() -> None:
    peer = MemoryPeer()
    peer.call(1, "Hold")
    peer.open(3, "Chat")
    peer.send(data(0, b"wrong"))
    await peer.settle()
    assert peer.grpc.num_cancelled == 1
    assert peer.grpc.num_streams == 0
    assert peer.context.counts.open_streams == 0
    peer.leave()


async def test_a_client_that_leaves_cancels_what_runs() -> None:
    peer = MemoryPeer()
    peer.call(1, "Hold")
    peer.open(3, "Chat")
    await peer.settle()
    peer.get(5, "/hold")
    peer.leave()
    await asyncio.sleep(0)
    assert peer.grpc.num_cancelled == peer.http.num_disconnected == 1
    assert peer.grpc.ended_streams == ["cancelled"]
    assert peer.context.counts.open_streams == 0
    assert not peer.context.connections


async def test_a_port_that_drains_takes_no_new_connection_for_long() -> None:
    peer = MemoryPeer(greets=False)
    peer.context.is_draining = True
    connection = Http2Connection(peer.context)
    connection.begin(peer.transport, b"")
    await peer.settle()
    assert peer.goaways == [(LAST, ErrorCode.NO_ERROR, b"")]
    connection.connection_lost(None)
    peer.leave()
