"""What is written over a transport of ours: at once, in order, and with back-pressure."""

from __future__ import annotations

import asyncio
import os

import pytest
from support.loops import on_both_loops
from support.socket_ends import MIB, Ends, Kept, calls_twin, polled, until

__all__ = ["calls_twin"]
pytestmark = pytest.mark.usefixtures("calls_twin")


@on_both_loops
async def test_what_is_written_is_sent_at_once_and_in_order() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept())
        for data in (b"1", bytearray(b"2"), memoryview(b"_3_")[1:2], b""):
            ends.transport.write(data)
        ends.transport.writelines([b"4", b"", memoryview(b"5")])
        ends.transport.writelines([])
        assert ends.transport.get_write_buffer_size() == 0
        assert ends.client.recv(100) == b"12345"  # no turn of the loop in between
        ends.client.close()
        await ends.until("end", "lost")


@on_both_loops
@pytest.mark.parametrize("num_before", [0, 6])
async def test_what_the_system_does_not_take_waits_and_the_protocol_is_told(num_before: int) -> None:
    first, second, third = os.urandom(3 * MIB), os.urandom(MIB), os.urandom(100)
    with polled() as poller:
        before = [Ends(poller, Kept()) for _ in range(num_before)]
        ends = Ends(poller, Kept(), buffer_bytes=65536)
        ends.transport.set_write_buffer_limits(high=1000, low=10)
        ends.transport.write(first)
        assert ends.protocol.told == ["made", "pause"]
        ends.transport.writelines([second, third])
        size = ends.transport.get_write_buffer_size()
        assert len(second) + len(third) < size <= len(first) + len(second) + len(third)
        assert await ends.read(len(first) + len(second) + len(third)) == first + second + third
        await ends.until("pause", "resume")
        assert ends.transport.get_write_buffer_size() == 0
        ends.client.sendall(b"and it reads on")
        await until(lambda: ends.protocol.received == b"and it reads on")
        ends.client.close()
        await ends.until("pause", "resume", "end", "lost")
        for other in before:
            other.client.close()
            await other.until("end", "lost")


@on_both_loops
async def test_more_buffers_than_the_system_takes_at_once() -> None:
    parts = [os.urandom(1 + number % 50) for number in range(5000)]
    with polled() as poller:
        ends = Ends(poller, Kept())
        ends.transport.writelines(parts)
        data = b"".join(parts)
        assert ends.transport.get_write_buffer_size() == 0, "it takes them all, one after the other"
        assert await ends.read(len(data)) == data
        ends.client.close()
        await ends.until("end", "lost")


@on_both_loops
async def test_who_writes_on_when_there_is_room_again() -> None:
    rest = [os.urandom(MIB) for _ in range(10)]
    data = b"".join(reversed(rest))

    def go_on(protocol: Kept, news: bytes | str) -> None:
        if news == "resume" and rest:
            protocol.transport.write(rest.pop())

    with polled() as poller:
        ends = Ends(poller, Kept(act=go_on), buffer_bytes=65536)
        ends.transport.write(rest.pop())
        assert await ends.read(len(data)) == data
        ends.client.close()
        await until(lambda: ends.is_lost)


@on_both_loops
async def test_limits_count_when_they_are_set() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept(), buffer_bytes=65536)
        assert ends.transport.get_write_buffer_limits() == (16 * 1024, 64 * 1024)
        ends.transport.set_write_buffer_limits(high=100 * MIB)
        assert ends.transport.get_write_buffer_limits() == (25 * MIB, 100 * MIB)
        ends.transport.write(bytes(8 * MIB))
        assert "pause" not in ends.protocol.told
        ends.transport.set_write_buffer_limits(low=1000)
        assert ends.transport.get_write_buffer_limits() == (1000, 4000)
        assert ends.protocol.told == ["made", "pause"]
        with pytest.raises(ValueError, match="expected 0 <= low <= high, got low 2 and high 1"):
            ends.transport.set_write_buffer_limits(high=1, low=2)
        ends.transport.abort()
        ends.client.close()
        await ends.until("pause", "lost")


@on_both_loops
@pytest.mark.parametrize("num_bytes", [10, 4 * MIB])
async def test_the_end_of_writing_comes_behind_what_was_written(num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    with polled() as poller:
        ends = Ends(poller, Kept(), buffer_bytes=65536)
        ends.transport.write(data)
        ends.transport.write_eof()
        ends.transport.write_eof()
        with pytest.raises(RuntimeError, match="cannot write after write_eof"):
            ends.transport.write(b"x")
        with pytest.raises(RuntimeError, match="cannot write after write_eof"):
            ends.transport.writelines([b"x"])
        assert await ends.read(num_bytes) == data
        assert await asyncio.to_thread(ends.client.recv, 1) == b""
        ends.client.sendall(b"it reads on")
        await until(lambda: ends.protocol.received == b"it reads on")
        ends.client.close()
        await until(lambda: ends.is_lost)


@pytest.mark.parametrize("seed", range(8))
@on_both_loops
async def test_a_conversation_of_any_sizes_arrives_whole(seed: int) -> None:
    """An echo that pauses, whose client writes and reads at the same time."""
    data = os.urandom(2 * MIB + seed)
    size = (1 << 3 * seed) + 1

    def echo(protocol: Kept, news: bytes | str) -> None:
        if isinstance(news, bytes):
            protocol.transport.write(news)
        elif news in ("pause", "resume"):
            (protocol.transport.pause_reading if news == "pause" else protocol.transport.resume_reading)()

    with polled() as poller:
        ends = Ends(poller, Kept(max(size, 512), echo), buffer_bytes=16384)
        sending = asyncio.ensure_future(asyncio.to_thread(ends.client.sendall, data))
        assert await ends.read(len(data)) == data
        await sending
        ends.client.close()
        await until(lambda: ends.is_lost)
