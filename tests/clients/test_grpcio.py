"""grpcio's clients, blocking and asyncio: the ones that most users of gRPC in Python have."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from support.certificates import Authority
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import WireLimits

MIB = 1 << 20
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SIZES = [0, 1, 5, 16379, 65531, 65536, MIB - 5, MIB, 4 * MIB + 1, 64 * MIB]
# Handlers of texts and values that HTTP has no room for.
TEXTS = ["plain", "100 %", "é漢", "two\nlines", "a" * 2000]


@pytest.fixture
def channel(wire: RunningWire) -> Iterator[grpc.Channel]:
    # With a pool of its own its connection is closed with it, and not when grpcio finds the time.
    with grpc.insecure_channel(wire.url, [*UNLIMITED, ("grpc.use_local_subchannel_pool", 1)]) as connected:
        yield connected


def unary(channel: Any, name: str) -> Any:
    return channel.unary_unary(f"/test.Wire/{name}")


def stream(channel: Any, name: str) -> Any:
    return channel.stream_stream(f"/test.Wire/{name}")


@pytest.mark.parametrize("size", SIZES)
def test_unary(channel: grpc.Channel, size: int) -> None:
    message = bytes(range(256)) * (size // 256 + 1)
    assert unary(channel, "Echo")(message[:size], timeout=60) == message[:size]


def test_many_unary_calls_at_once(channel: grpc.Channel) -> None:
    echo = unary(channel, "Echo")
    calls = [(number, echo.future(b"%d" % number * (number % 50))) for number in range(500)]
    for number, call in calls:
        assert call.result(timeout=30) == b"%d" % number * (number % 50)


def test_streams_of_1000_messages(channel: grpc.Channel) -> None:
    messages = [b"%d" % number * (number % 100) for number in range(1000)]
    assert list(stream(channel, "Chat")(iter(messages), timeout=60)) == messages
    answers = list(stream(channel, "Count")(iter([b"1000 1000"]), timeout=60))
    assert [int.from_bytes(answer[:4], "big") for answer in answers] == list(range(1000))
    assert list(stream(channel, "Sum")(iter(messages), timeout=60)) == [b"1000 %d" % sum(map(len, messages))]


def test_large_messages_of_a_stream(channel: grpc.Channel) -> None:
    messages = [bytes([number]) * (3 * MIB) for number in range(5)]
    assert list(stream(channel, "Chat")(iter(messages), timeout=60)) == messages


def test_a_conversation(channel: grpc.Channel) -> None:
    """Each message waits for the answer to the one before."""
    answered = threading.Semaphore(1)

    def requests() -> Iterator[bytes]:
        for number in range(50):
            assert answered.acquire(timeout=10)
            yield b"%d" % number

    answers = []
    for answer in stream(channel, "Chat")(requests(), timeout=60):
        answers.append(answer)
        answered.release()
    assert answers == [b"%d" % number for number in range(50)]


def test_metadata(channel: grpc.Channel) -> None:
    sent = (("x-text", "a value"), ("x-data-bin", bytes(range(256))), ("x-empty-bin", b""))
    found = json.loads(unary(channel, "Metadata")(b"", metadata=sent, timeout=10))
    assert found["x-text"] == "a value"
    assert bytes(found["x-data-bin"]) == bytes(range(256))
    assert found["x-empty-bin"] == []
    assert found["has-deadline"] == "True"


@pytest.mark.parametrize("text", TEXTS)
def test_error_texts(channel: grpc.Channel, text: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        unary(channel, "Fail")(f"9 {text}".encode(), timeout=10)
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert raised.value.details() == text


def test_a_stream_that_fails_late(channel: grpc.Channel) -> None:
    answers = stream(channel, "FailLate")(iter([b"one"]), timeout=10)
    assert next(answers) == b"one"
    with pytest.raises(grpc.RpcError) as raised:
        next(answers)
    assert raised.value.details() == "too late: 100 % \n é 漢"


def test_unknown_methods(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        unary(channel, "Nothing")(b"", timeout=10)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests(wire: RunningWire, algorithm: grpc.Compression) -> None:
    message = b"compressible " * 10000
    with grpc.insecure_channel(wire.url, UNLIMITED, compression=algorithm) as channel:
        assert unary(channel, "Echo")(message, timeout=10) == message
        assert list(stream(channel, "Chat")(iter([message] * 5), timeout=10)) == [message] * 5


@pytest.mark.parametrize("level", ["low", "high"])
def test_compressed_answers(level: str) -> None:
    """Only where it is configured, and only for those who accept it."""
    with running_wire(limits=WireLimits(grpc_compression=level)) as wire:
        with grpc.insecure_channel(wire.url) as channel:
            assert unary(channel, "Size")(b"1000000", timeout=10) == bytes(1000000)
            assert [len(answer) for answer in stream(channel, "Count")(iter([b"5 10000"]), timeout=10)] == [10000] * 5
        wire.expect_idle()


def test_deadlines(channel: grpc.Channel, wire: RunningWire) -> None:
    before = wire.grpc.num_cancelled
    # Connects, so that the other deadline is spent in the handler.
    assert unary(channel, "Echo")(b"in time", timeout=10) == b"in time"
    with pytest.raises(grpc.RpcError) as raised:
        unary(channel, "Hold")(b"", timeout=1.0)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    wire.until(lambda: wire.grpc.num_cancelled == before + 1, "the handler was cancelled")


def test_cancelled_calls(channel: grpc.Channel, wire: RunningWire) -> None:
    before = wire.grpc.num_cancelled
    calls = [unary(channel, "Hold").future(b"%d" % number) for number in range(20)]
    wire.until(lambda: len(wire.grpc.held) == 20, "all are held")
    for call in calls:
        assert call.cancel()
    wire.until(lambda: wire.grpc.num_cancelled == before + 20, "the handlers were cancelled")
    assert unary(channel, "Echo")(b"after", timeout=10) == b"after"


def test_cancelled_streams(channel: grpc.Channel, wire: RunningWire) -> None:
    before = len(wire.grpc.ended_streams)
    answers = stream(channel, "Count")(iter([b"1000000 1000"]))
    assert len(next(answers)) == 1000
    answers.cancel()
    wire.until(lambda: wire.grpc.ended_streams[before:] == ["cancelled"], "the handler was cancelled")


def test_tls(tls_wire: RunningWire, authority: Authority) -> None:
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    with grpc.secure_channel(tls_wire.url, credentials, UNLIMITED) as channel:
        for size in (0, 1000, 5 * MIB):
            assert unary(channel, "Echo")(bytes(size), timeout=30) == bytes(size)
        messages = [b"%d" % number for number in range(1000)]
        assert list(stream(channel, "Chat")(iter(messages), timeout=30)) == messages


async def test_asyncio_unary(wire: RunningWire) -> None:
    async with grpc.aio.insecure_channel(wire.url, UNLIMITED) as channel:
        for size in SIZES[:-1]:
            assert await unary(channel, "Echo")(bytes(size), timeout=30) == bytes(size)


async def test_asyncio_streams(wire: RunningWire) -> None:
    async with grpc.aio.insecure_channel(wire.url, UNLIMITED) as channel:
        call = stream(channel, "Chat")(timeout=30)
        for number in range(200):
            await call.write(b"%d" % number)
            assert await call.read() == b"%d" % number
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_asyncio_errors_and_cancellation(wire: RunningWire) -> None:
    async with grpc.aio.insecure_channel(wire.url, UNLIMITED) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await unary(channel, "Fail")("5 é漢".encode(), timeout=10)
        assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.NOT_FOUND, "é漢")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await unary(channel, "Hold")(b"", timeout=0.05)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
