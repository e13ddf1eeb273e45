"""Streaming calls: a Task each, bounded both ways."""

from __future__ import annotations

import asyncio
import gzip
import logging

import pytest
from support.http2_frames import ErrorCode, FrameType, Setting, data, headers, rst_stream, window_update
from support.memory_http2 import MemoryPeer, until
from support.raw_http2 import call_fields, prefixed

from modelserver.protocol.call import Method, RpcError, StreamCall
from modelserver.wire.limits import Http2Limits, WireLimits

MIB = 1 << 20


def serving(handle: object, **options: object) -> MemoryPeer:
    """A peer whose server has one streaming method."""
    return MemoryPeer(methods={"/test.Wire/Run": Method(stream=handle)}, **options)  # type: ignore[arg-type]


async def test_messages_come_and_go_one_by_one() -> None:
    peer = MemoryPeer()
    peer.open(1, "Chat")
    for index in range(3):
        peer.send(data(1, prefixed(b"%d" % index)))
        await peer.settle()
        assert peer.answer(1).messages[-1] == b"%d" % index
    peer.send(data(1, end=True))
    await peer.settle()
    assert len(peer.answer(1).messages) == 3
    assert peer.answer(1).grpc_status == 0
    assert peer.grpc.ended_streams == ["done"]


async def test_answers_may_come_after_the_end_of_the_client() -> None:
    peer = MemoryPeer()
    peer.open(1, "Sum")
    peer.send(data(1, prefixed(b"abc") + prefixed(b"")), data(1, prefixed(b"de"), end=True))
    await peer.settle()
    assert peer.answer(1).messages == [b"3 5"]


async def test_a_call_without_messages_has_headers_and_trailers() -> None:
    peer = MemoryPeer()
    peer.open(1, "Chat")
    peer.send(data(1, end=True))
    await peer.settle()
    assert peer.answer(1).trailers == {"grpc-status": "0"}
    assert not peer.answer(1).body


async def test_a_failure_before_the_first_message_is_trailers_only() -> None:
    async def handle(call: StreamCall) -> None:
        raise RpcError(5, "nothing here")

    peer = serving(handle)
    peer.open(1, "Run")
    await peer.settle()
    assert peer.answer(1).is_trailers_only
    assert peer.answer(1).grpc_status == 5
    peer.send(data(1, b"\0"))
    await until(lambda: peer.read() is not None and bool(peer.resets))
    assert peer.resets == {1: ErrorCode.NO_ERROR}


async def test_a_failure_after_messages_is_in_the_trailers() -> None:
    peer = MemoryPeer()
    peer.open(1, "FailLate")
    peer.send(data(1, prefixed(b"one")))
    await peer.settle()
    answer = peer.answer(1)
    assert answer.messages == [b"one"]
    assert answer.trailers is not None
    assert answer.grpc_status == 9


async def test_a_handler_that_raises_costs_its_call_only(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(call: StreamCall) -> None:
        raise ValueError("secret")

    peer = serving(handle)
    with caplog.at_level(logging.ERROR):
        peer.open(1, "Run")
        await peer.settle()
    assert peer.answer(1).grpc_status == 13
    assert "secret" not in peer.answer(1).grpc_message
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_client_that_cancels_cancels_the_task(is_begun: bool) -> None:
    """Also one that had no time to begin; and both give their place back."""
    peer = MemoryPeer(WireLimits(http2=Http2Limits(max_concurrent_streams=1)))
    if is_begun:
        peer.open(1, "Chat")
        await peer.settle()
        peer.send(rst_stream(1))
    else:
        peer.send(headers(1, call_fields("Chat"), end=False), rst_stream(1))
    await peer.settle()
    assert peer.grpc.num_streams == 0
    assert peer.connection.max_open == 1
    peer.call(3, "Echo", b"x")
    assert peer.answer(3).messages == [b"x"]


async def test_sending_to_a_client_that_left_fails() -> None:
    errors: list[RpcError] = []

    async def handle(call: StreamCall) -> None:
        try:
            async for _ in call.messages:
                pass
        except asyncio.CancelledError:
            assert call.send_now is not None
            assert not call.send_now((b"x",))
            try:
                await call.send((b"x",))
            except RpcError as error:
                errors.append(error)
            raise

    peer = serving(handle)
    peer.open(1, "Run")
    await peer.settle()
    peer.send(rst_stream(1))
    await peer.settle()
    assert [error.status for error in errors] == [1]


async def test_the_deadline_cancels_the_task() -> None:
    peer = MemoryPeer()
    peer.open(1, "Chat", ("grpc-timeout", "30m"))
    peer.send(data(1, prefixed(b"x")))
    await until(lambda: peer.read() is not None and peer.answer(1).has_ended)
    assert peer.answer(1).messages == [b"x"]
    assert peer.answer(1).grpc_status == 4
    await peer.settle()
    assert peer.grpc.ended_streams == ["cancelled"]


async def test_a_handler_waits_while_the_client_has_no_window() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 1000})
    peer.open(1, "Count")
    peer.send(data(1, prefixed(b"1000 1000"), end=True))
    await peer.settle(300)
    assert peer.grpc.num_sent < 100
    peer.send(window_update(1, 2 * MIB), window_update(0, 2 * MIB))
    await peer.settle(3000)
    assert len(peer.answer(1).messages) == 1000
    assert peer.answer(1).grpc_status == 0


async def test_a_handler_that_sends_without_end_lets_others_run() -> None:
    """Nothing makes it wait: neither windows nor the transport. Still its frames do not pile up."""
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 1 << 30})
    peer.send(window_update(0, 1 << 30))
    peer.open(1, "Count")
    peer.send(data(1, prefixed(b"5000 100"), end=True))
    await peer.settle(2)
    assert 0 < peer.grpc.num_sent < 500
    await peer.settle(1000)
    assert len(peer.answer(1).messages) == 5000


async def test_send_now_sends_while_there_is_room() -> None:
    sent: list[bool] = []

    async def handle(call: StreamCall) -> None:
        assert call.send_now is not None
        sent.extend([call.send_now((bytes(2000),)) for _ in range(100)])

    peer = serving(handle, announces={Setting.INITIAL_WINDOW_SIZE: 10_000})
    peer.open(1, "Run")
    await peer.settle()
    assert 30 < sum(sent) < 40
    assert sent == sorted(sent, reverse=True)
    peer.send(window_update(1, MIB), window_update(0, MIB))
    await peer.settle()
    assert peer.answer(1).messages == [bytes(2000)] * sum(sent)
    assert peer.answer(1).grpc_status == 0


async def test_credit_comes_back_as_messages_are_taken() -> None:
    gate = asyncio.Event()

    async def handle(call: StreamCall) -> None:
        await gate.wait()
        async for _ in call.messages:
            pass

    peer = serving(handle, limits=WireLimits(http2=Http2Limits(initial_window_bytes=100_000)))
    peer.open(1, "Run")
    for _ in range(9):
        peer.send(data(1, prefixed(bytes(9995))))
        assert not peer.of_type(FrameType.WINDOW_UPDATE, 1)
    gate.set()
    await peer.settle()
    credit = sum(frame.number() for frame in peer.of_type(FrameType.WINDOW_UPDATE, 1))
    assert 75_000 <= credit <= 90_000
    peer.leave()


async def test_large_messages_wait_for_the_handler_before_more_are_let_in() -> None:
    gate = asyncio.Event()
    taken: list[int] = []

    async def handle(call: StreamCall) -> None:
        await gate.wait()
        taken.extend([len(message) async for message in call.messages])

    size = 5 * MIB
    peer = serving(handle)
    peer.open(1, "Run")
    window = MIB

    def send_message() -> bool:
        """As far as the window lets it; whether that was all of it."""
        nonlocal window
        left = prefixed(bytes(size))
        while left and window:
            piece = left[: min(MIB, window)]
            left = left[len(piece) :]
            window -= len(piece)
            peer.send(data(1, piece))
            window += sum(frame.number() for frame in peer.of_type(FrameType.WINDOW_UPDATE, 1))
        return not left

    assert send_message()
    window += sum(frame.number() for frame in peer.of_type(FrameType.WINDOW_UPDATE, 1))
    assert peer.connection.streams[1].receive_window == window
    gate.set()
    await peer.settle()
    window += sum(frame.number() for frame in peer.of_type(FrameType.WINDOW_UPDATE, 1))
    assert peer.connection.streams[1].receive_window == window
    peer.send(data(1, end=True))
    await peer.settle()
    assert taken == [size]


async def test_compressed_messages_both_ways() -> None:
    peer = MemoryPeer(WireLimits(grpc_compression="low"))
    peer.open(1, "Chat", ("grpc-encoding", "gzip"), ("grpc-accept-encoding", "gzip"))
    contents = [b"small", bytes(60_000)]
    for content in contents:
        peer.send(data(1, prefixed(gzip.compress(content), flag=1)))
    peer.send(data(1, end=True))
    answer = await peer.until_answered(1)
    assert answer.fields is not None
    assert answer.fields["grpc-encoding"] == "gzip"
    assert [gzip.decompress(message) for message in answer.messages] == contents


@pytest.mark.parametrize(
    ("body", "status"),
    [(prefixed(b"x", flag=7), 13), (prefixed(b"junk", flag=1), 13), (prefixed(b"", length=9_000_000), 8)],
)
async def test_what_is_no_message_ends_the_call(body: bytes, status: int) -> None:
    peer = MemoryPeer(WireLimits(max_message_bytes=8_000_000))
    peer.open(1, "Chat", ("grpc-encoding", "gzip"))
    peer.send(data(1, prefixed(b"fine")), data(1, body))
    await peer.settle()
    assert peer.answer(1).grpc_status == status
    await peer.settle()
    assert peer.grpc.num_streams == 0
    assert not peer.goaways
