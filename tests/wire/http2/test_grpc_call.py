"""Unary calls from HEADERS to trailers."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
import zlib

import pytest
from support.http2_frames import ErrorCode, FrameType, Setting, data, headers, rst_stream, window_update
from support.memory_http2 import MemoryPeer, until
from support.raw_http2 import call_fields, prefixed

from modelserver.protocol.call import Method, UnaryCall
from modelserver.telemetry.wire_counts import Violation
from modelserver.wire.http2.grpc_call import GrpcCall
from modelserver.wire.limits import WireLimits

MIB = 1 << 20


async def test_the_stream_is_the_call() -> None:
    peer = MemoryPeer()
    before_ns = time.monotonic_ns()
    peer.call(1, "Hold", b"message", ("grpc-timeout", "5S"), ("x-key", "value"))
    (call,) = peer.grpc.held
    assert isinstance(call, GrpcCall)
    assert call is peer.connection.streams[1]
    assert (call.message, call.metadata["x-key"]) == (b"message", "value")
    assert call.deadline_ns is not None
    assert before_ns <= call.deadline_ns - 5 * 10**9 <= time.monotonic_ns()
    peer.leave()


async def test_an_answer_from_elsewhere_leaves_at_the_end_of_the_turn() -> None:
    peer = MemoryPeer()
    peer.call(1, "Hold", b"x")
    peer.grpc.release()
    assert not peer.read()
    await peer.settle()
    assert peer.answer(1).messages == [b"x"]
    assert not peer.connection.streams


@pytest.mark.parametrize("num_parts", [0, 1, 3])
async def test_the_parts_of_an_answer_are_one_message(num_parts: int) -> None:
    parts = tuple(memoryview(b"%d" % index) for index in range(num_parts))
    peer = MemoryPeer(methods={"/test.Wire/Parts": Method(unary=lambda call: call.reply(parts))})
    peer.call(1, "Parts")
    assert peer.answer(1).messages == [b"".join(parts)]


async def test_a_large_answer_is_not_copied() -> None:
    tensor = memoryview(bytes(100_000))
    methods = {"/test.Wire/Large": Method(unary=lambda call: call.reply((b"head", tensor)))}
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: MIB}, methods=methods)
    peer.send(window_update(0, MIB))
    written: list[object] = []
    # As over a socket, whose `writelines` takes the pieces as they are.
    peer.connection.sender._joins_all = False
    peer.transport.writelines = written.extend  # type: ignore[method-assign]
    peer.call(1, "Large")
    views = [part for part in written if isinstance(part, memoryview)]
    assert sum(map(len, views)) == 100_000
    assert all(view.obj is tensor.obj for view in views)
    peer.leave()


async def test_a_failure_is_trailers_only() -> None:
    peer = MemoryPeer()
    peer.call(1, "Fail", "5 there is no é".encode())
    answer = peer.answer(1)
    assert answer.is_trailers_only
    assert (answer.status, answer.grpc_status, answer.grpc_message) == (200, 5, "there is no %C3%A9")


async def test_a_handler_that_raises_costs_its_call_only(caplog: pytest.LogCaptureFixture) -> None:
    def fall(call: UnaryCall) -> None:
        raise ValueError("secret")

    def answer_and_fall(call: UnaryCall) -> None:
        call.reply((b"done",))
        raise ValueError("late")

    peer = MemoryPeer(methods={"/test.Wire/Fall": Method(unary=fall), "/test.Wire/Late": Method(unary=answer_and_fall)})
    with caplog.at_level(logging.ERROR):
        peer.call(1, "Fall")
        peer.call(3, "Late")
        # In pieces, which is another way to the handler.
        peer.open(5, "Fall")
        peer.send(data(5, prefixed(b"xy")[:6]))
        peer.send(data(5, prefixed(b"xy")[6:], end=True))
    assert peer.answer(1).grpc_status == peer.answer(5).grpc_status == 13
    assert "secret" not in peer.answer(1).grpc_message
    assert peer.answer(3).messages == [b"done"]
    assert caplog.text.count("Traceback") == 3


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ([], 12, "got none"),
        ([b"\0\0"], 13, "cut off"),
        ([prefixed(b"abc")[:-1]], 13, "cut off"),
        ([prefixed(b"a") + prefixed(b"b")], 12, "got more"),
        ([prefixed(b"a"), prefixed(b"b")], 12, "got more"),
        ([prefixed(b"a", flag=2)], 13, "0 or 1"),
        ([prefixed(b"a", flag=1)], 13, "no grpc-encoding"),
        ([prefixed(b"", length=5000)], 8, "larger than max (5000 vs. 4096)"),
    ],
)
async def test_requests_that_are_not_one_message(body: list[bytes], status: int, text: str) -> None:
    peer = MemoryPeer(WireLimits(max_message_bytes=4096))
    peer.open(1, "Echo")
    peer.send(*[data(1, piece) for piece in body], data(1, end=True))
    answer = peer.answer(1)
    assert answer.is_trailers_only
    assert answer.grpc_status == status
    assert text in answer.grpc_message
    assert not peer.connection.streams
    assert not peer.goaways


async def test_an_early_answer_tells_a_client_that_goes_on_to_stop() -> None:
    """And what it has sent meanwhile is no offence."""
    peer = MemoryPeer(WireLimits(max_message_bytes=100))
    peer.open(1, "Echo")
    peer.send(data(1, prefixed(b"", length=101)))
    assert [frame.type for frame in peer.frames] == [FrameType.HEADERS]
    peer.send(data(1, bytes(50)))
    await until(lambda: peer.read() is not None and bool(peer.resets))
    assert peer.resets == {1: ErrorCode.NO_ERROR}
    peer.send(data(1, bytes(50)), data(1, bytes(50), end=True), rst_stream(1), window_update(1, 5))
    assert not peer.goaways


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [10, 300_000])
async def test_compressed_requests(encoding: str, size: int) -> None:
    """Large ones are decompressed in another thread."""
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: MIB})
    peer.send(window_update(0, MIB))
    content = bytes(range(250)) * (size // 250) + b"x"
    packed = gzip.compress(content) if encoding == "gzip" else zlib.compress(content)
    peer.send(
        headers(1, call_fields("Echo", ("grpc-encoding", encoding)), end=False),
        data(1, prefixed(packed, flag=1), end=True),
    )
    await peer.until_answered(1)
    assert peer.answer(1).messages == [content]


async def test_a_call_that_was_cancelled_while_it_was_decompressed() -> None:
    peer = MemoryPeer()
    packed = gzip.compress(bytes(50_000_000), 1)
    peer.send(
        headers(1, call_fields("Hold", ("grpc-encoding", "gzip")), end=False),
        data(1, prefixed(packed[: 1 << 20], flag=1), end=True),
        rst_stream(1),
    )
    await asyncio.get_running_loop().shutdown_default_executor()
    await peer.settle()
    assert not peer.grpc.held
    assert not peer.goaways


async def test_an_unknown_encoding_names_those_that_are_known() -> None:
    peer = MemoryPeer()
    head = headers(1, call_fields("Echo", ("grpc-encoding", "snappy")), end=False)
    peer.send(head, data(1, prefixed(b"abc", flag=1), end=True))
    answer = peer.answer(1)
    assert answer.grpc_status == 12
    assert answer.fields is not None
    assert answer.fields["grpc-accept-encoding"] == "identity,deflate,gzip"


async def test_an_exploding_message_is_refused() -> None:
    peer = MemoryPeer(WireLimits(max_message_bytes=100_000))
    head = headers(1, call_fields("Echo", ("grpc-encoding", "gzip")), end=False)
    peer.send(head, data(1, prefixed(gzip.compress(bytes(1_000_000)), flag=1), end=True))
    assert peer.answer(1).grpc_status == 8


@pytest.mark.parametrize("size", [100, 100_000])
async def test_answers_are_compressed_where_that_is_configured_and_accepted(size: int) -> None:
    peer = MemoryPeer(WireLimits(grpc_compression="low"))
    peer.call(1, "Size", b"%d" % size, ("grpc-accept-encoding", "identity, gzip"))
    answer = await peer.until_answered(1)
    assert answer.fields is not None
    assert answer.fields["grpc-encoding"] == "gzip"
    assert answer.body[0] == 1
    assert gzip.decompress(answer.body[5:]) == bytes(size)
    peer.call(3, "Size", b"%d" % size)
    assert not peer.answer(3).body[0]


async def test_a_compressed_answer_that_nobody_waits_for() -> None:
    peer = MemoryPeer(WireLimits(grpc_compression="high"))
    peer.call(1, "Size", b"1000000", ("grpc-accept-encoding", "gzip"))
    peer.send(rst_stream(1))
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not await peer.settle()
    assert peer.connection.max_open == 1000


async def test_a_cancelled_call_tells_its_handler_once() -> None:
    peer = MemoryPeer()
    cancelled: list[int] = []
    peer.call(1, "Hold", b"x")
    (call,) = peer.grpc.held
    call.on_cancel = lambda: cancelled.append(1)
    peer.send(rst_stream(1))
    peer.leave()
    assert cancelled == [1]
    call.reply((b"too late",))
    call.fail(13, "and again")
    assert not peer.read()


async def test_the_deadline_ends_a_call_that_runs() -> None:
    peer = MemoryPeer()
    begun_s = time.monotonic()
    peer.call(1, "Hold", b"x", ("grpc-timeout", "100m"))
    answer = await peer.until_answered(1)
    assert time.monotonic() - begun_s >= 0.1
    assert answer.is_trailers_only
    assert (answer.grpc_status, answer.grpc_message) == (4, "Deadline Exceeded")
    assert peer.grpc.num_cancelled == 1
    assert not peer.resets


async def test_the_deadline_ends_a_call_whose_message_does_not_come() -> None:
    peer = MemoryPeer()
    peer.open(1, "Echo", ("grpc-timeout", "1m"))
    await until(lambda: bool(peer.read()))
    assert peer.answer(1).grpc_status == 4
    peer.send(data(1, b"\0"))
    await until(lambda: peer.read() is not None and bool(peer.resets))
    assert peer.resets == {1: ErrorCode.NO_ERROR}


async def test_the_deadline_ends_an_answer_that_is_not_taken() -> None:
    peer = MemoryPeer(announces={Setting.INITIAL_WINDOW_SIZE: 0})
    peer.call(1, "Echo", b"x", ("grpc-timeout", "1m"))
    await until(lambda: peer.read() is not None and bool(peer.resets))
    assert peer.resets == {1: ErrorCode.CANCEL}
    assert peer.connection.sender.num_queued_bytes == 0


async def test_no_time_at_all_runs_nothing() -> None:
    peer = MemoryPeer()
    peer.call(1, "Hold", b"x", ("grpc-timeout", "0n"))
    assert peer.answer(1).grpc_status == 4
    assert not peer.grpc.held


async def test_calls_that_are_answered_leave_no_deadline() -> None:
    peer = MemoryPeer()
    for index in range(10):
        peer.call(2 * index + 1, "Echo", b"x", ("grpc-timeout", "50m"))
    assert not peer.context.deadlines._slots


async def test_a_message_that_takes_too_much_memory() -> None:
    peer = MemoryPeer(WireLimits(max_assembly_bytes=MIB))
    for stream_id in (1, 3):  # one may have more than all together should
        peer.open(stream_id, "Echo")
        peer.send(data(stream_id, prefixed(bytes(900_000), length=4 * MIB)))
        for _ in range(3):
            peer.send(data(stream_id, bytes(900_000)))
    assert peer.answer(3).grpc_status == 8
    assert peer.violations == {Violation.ASSEMBLY_BUDGET: 1}
    peer.send(data(1, bytes(4 * MIB - 3_600_000), end=True))
    assert peer.answer(1).body.startswith(prefixed(b"", length=4 * MIB))
    assert peer.context.assembly.num_bytes == 0
