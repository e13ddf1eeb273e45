"""grpclib: gRPC for asyncio on the h2 library, so another HTTP/2 and another gRPC than grpcio's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpclib.client import Channel, StreamStreamMethod, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, StreamTerminatedError
from support.wires import RunningWire


class Bytes(CodecBase):
    """Messages are bytes already."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        found: bytes = message
        return found

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data


@pytest.fixture
async def channel(wire: RunningWire) -> AsyncIterator[Channel]:
    host, port = wire.address
    connected = Channel(host, port, codec=Bytes())
    yield connected
    connected.close()
    await asyncio.sleep(0)


def unary(channel: Channel, name: str) -> Any:
    return UnaryUnaryMethod(channel, f"/test.Wire/{name}", bytes, bytes)


@pytest.mark.parametrize("size", [0, 1, 70_000, 3 << 20, pytest.param(64 << 20, marks=pytest.mark.slow)])
async def test_unary(channel: Channel, size: int) -> None:
    assert await unary(channel, "Echo")(bytes(size), timeout=100) == bytes(size)


async def test_a_stream(channel: Channel) -> None:
    chat: Any = StreamStreamMethod(channel, "/test.Wire/Chat", bytes, bytes)
    async with chat.open() as stream:
        for number in range(1000):
            await stream.send_message(b"%d" % number)
            assert await stream.recv_message() == b"%d" % number
        await stream.end()
        assert await stream.recv_message() is None


@pytest.mark.parametrize("text", ["plain", "é漢 %"])
async def test_errors(channel: Channel, text: str) -> None:
    with pytest.raises(GRPCError) as raised:
        await unary(channel, "Fail")(f"5 {text}".encode(), timeout=10)
    assert (raised.value.status, raised.value.message) == (Status.NOT_FOUND, text)


async def test_a_deadline(channel: Channel, wire: RunningWire) -> None:
    before = wire.grpc.num_cancelled
    assert await unary(channel, "Echo")(b"in time", timeout=10) == b"in time"
    with pytest.raises((asyncio.TimeoutError, GRPCError, StreamTerminatedError)):
        await unary(channel, "Hold")(b"", timeout=1.0)
    wire.until(lambda: wire.grpc.num_cancelled == before + 1, "the handler was cancelled")


async def test_binary_metadata(channel: Channel) -> None:
    answer = await unary(channel, "Metadata")(b"", timeout=10, metadata={"x-bin": b"\x00\xff", "x-text": "abc"})
    assert b'"x-bin": [0, 255]' in answer
    assert b'"x-text": "abc"' in answer
