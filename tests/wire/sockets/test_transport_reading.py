"""What comes over a transport of ours, and how its peer ends; over real sockets, on both loops, with both twins."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest
from support.loops import on_both_loops
from support.socket_ends import MIB, Ends, Kept, calls_twin, polled, until

from modelserver.wire.sockets.transport import receive_soon_of

__all__ = ["calls_twin"]
pytestmark = pytest.mark.usefixtures("calls_twin")


@on_both_loops
async def test_what_comes_is_received() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept())
        for number in range(20):
            ends.client.sendall(b"%d," % number)
            await asyncio.sleep(0)
        expected = b"".join(b"%d," % number for number in range(20))
        await until(lambda: ends.protocol.received == expected)
        ends.client.close()
        await ends.until("end", "lost")
        assert ends.protocol.error is None
        assert ends.transport.is_closing()
        assert ends.accepted.fileno() == -1
        assert not ends.failures


@on_both_loops
async def test_what_has_come_already_is_received_at_once() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept(), say=b"early")
        assert ends.protocol.received == b"early"
        assert ends.protocol.told == ["made"]
        ends.transport.abort()
        ends.client.close()
        await ends.until("lost")


@on_both_loops
@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_more_than_the_buffer_holds_comes_in_pieces(size: int) -> None:
    data = os.urandom(20_000 if size > 1 else 300)
    with polled() as poller:
        ends = Ends(poller, Kept(size))
        ends.client.sendall(data)
        await until(lambda: ends.protocol.received == data)
        ends.client.close()
        await ends.until("end", "lost")


@on_both_loops
@pytest.mark.parametrize("num_connections", [1, 4, 5, 100, 300])
async def test_many_connections_each_receive_their_own(num_connections: int) -> None:
    with polled() as poller:
        all_ends = [Ends(poller, Kept()) for _ in range(num_connections)]
        for _ in range(3):
            for number, ends in enumerate(all_ends):
                ends.client.sendall(b"%d " % number)
        for number, ends in enumerate(all_ends):
            await until(lambda ends=ends, expected=b"%d " % number * 3: ends.protocol.received == expected)
        for ends in all_ends:
            ends.client.close()
        for ends in all_ends:
            await ends.until("end", "lost")


@on_both_loops
async def test_who_pauses_receives_nothing_until_it_reads_on() -> None:
    def pause(protocol: Kept, data: bytes | str) -> None:
        if data == b"x":
            protocol.transport.pause_reading()

    with polled() as poller:
        all_ends = [Ends(poller, Kept(1, pause)) for _ in range(10)]
        for ends in all_ends:
            ends.client.sendall(b"axbxc")
        for expected in (b"ax", b"axbx"):
            for ends in all_ends:
                await until(lambda ends=ends, expected=expected: ends.protocol.received == expected)
            await asyncio.sleep(0.02)
            for ends in all_ends:
                assert ends.protocol.received == expected
                assert not ends.transport.is_reading()
                ends.transport.pause_reading()
                ends.transport.resume_reading()
                ends.transport.resume_reading()
        for ends in all_ends:
            await until(lambda ends=ends: ends.protocol.received == b"axbxc")
            ends.client.close()
            await ends.until("end", "lost")


@on_both_loops
async def test_another_protocol_takes_over_in_the_middle() -> None:
    second = Kept()

    def hand_over(protocol: Kept, data: bytes | str) -> None:
        if isinstance(data, bytes):
            protocol.transport.set_protocol(second)

    with polled() as poller:
        for say in (b"", b"1"):
            second.received = b""
            ends = Ends(poller, Kept(1, hand_over), say=say)
            ends.client.sendall(b"12"[len(say) :])
            await until(lambda: second.received == b"2")
            ends.client.sendall(b"3")
            await until(lambda: second.received == b"23")
            assert ends.protocol.received == b"1"
            assert ends.transport.get_protocol() is second
            ends.client.close()
            await until(lambda ends=ends: ends.accepted.fileno() == -1)
            assert second.told[-2:] == ["end", "lost"]


@on_both_loops
async def test_only_protocols_with_a_buffer_are_taken() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept())
        with pytest.raises(TypeError, match=r"expected an asyncio\.BufferedProtocol, got Protocol"):
            ends.transport.set_protocol(asyncio.Protocol())
        ends.client.close()
        await ends.until("end", "lost")


@on_both_loops
async def test_what_comes_in_a_moment_is_received_without_a_turn() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept())
        receive_soon = receive_soon_of(ends.transport)
        assert receive_soon is not None
        receive_soon()
        assert ends.protocol.received == b""
        ends.client.sendall(b"x")
        receive_soon()
        assert ends.protocol.received == b"x"
        ends.transport.pause_reading()
        ends.client.sendall(b"y")
        receive_soon()
        assert ends.protocol.received == b"x"
        ends.transport.resume_reading()
        await until(lambda: ends.protocol.received == b"xy")
        ends.client.close()
        receive_soon()
        receive_soon()
        await ends.until("end", "lost")
        receive_soon()
        assert not ends.failures


# The other end.


@on_both_loops
async def test_who_stays_when_the_peer_has_ended_may_go_on_writing() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept())
        ends.protocol.stays_at_end = True
        ends.client.shutdown(socket.SHUT_WR)
        await ends.until("end")
        ends.transport.resume_reading()
        assert not ends.transport.is_reading()
        ends.transport.write(b"still here")
        assert await ends.read(10) == b"still here"
        ends.transport.close()
        await ends.until("end", "lost")
        assert ends.client.recv(1) == b""
        ends.client.close()


@on_both_loops
async def test_a_reset_is_told_once() -> None:
    with polled() as poller:
        all_ends = [Ends(poller, Kept()) for _ in range(6)]
        for ends in all_ends:
            ends.client.sendall(b"x")
            await until(lambda ends=ends: ends.protocol.received == b"x")
            ends.reset()
        for ends in all_ends:
            await until(lambda ends=ends: ends.is_lost)
            assert isinstance(ends.protocol.error, ConnectionResetError)
            assert ends.protocol.told == ["made", "lost"]
            assert not ends.failures


@on_both_loops
async def test_a_reset_that_comes_with_the_last_bytes_is_told() -> None:
    with polled() as poller:
        all_ends = [Ends(poller, Kept()) for _ in range(8)]
        for ends in all_ends:
            ends.client.sendall(b"the last words")
            ends.reset()
        for ends in all_ends:
            await until(lambda ends=ends: ends.is_lost)
            assert ends.protocol.received in (b"the last words", b"")
            assert not ends.failures


@on_both_loops
async def test_a_reset_behind_the_last_bytes_is_found_by_who_reads_on_later() -> None:
    def pause(protocol: Kept, data: bytes | str) -> None:
        if isinstance(data, bytes):
            protocol.transport.pause_reading()

    with polled() as poller:
        all_ends = [Ends(poller, Kept(act=pause)) for _ in range(8)]
        for ends in all_ends:
            ends.client.sendall(b"the last words")
            ends.reset()
        for ends in all_ends:
            await until(lambda ends=ends: ends.protocol.received != b"" or ends.is_lost)
            ends.transport.resume_reading()
        for ends in all_ends:
            await until(lambda ends=ends: ends.is_lost)


@on_both_loops
async def test_who_reads_nothing_and_is_reset_is_found_by_writing() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept())
        ends.transport.pause_reading()
        ends.reset()
        await asyncio.sleep(0.01)
        assert ends.protocol.told == ["made"]
        ends.transport.write(b"x")
        ends.transport.write(b"y")
        await ends.until("lost")
        assert isinstance(ends.protocol.error, OSError)
        assert ends.protocol.error.errno in (errno.EPIPE, errno.ECONNRESET)


@on_both_loops
@pytest.mark.parametrize("num_before", [0, 6])
async def test_who_is_reset_while_something_waits_is_found(num_before: int) -> None:
    with polled() as poller:
        before = [Ends(poller, Kept()) for _ in range(num_before)]
        ends = Ends(poller, Kept(), buffer_bytes=65536)
        ends.transport.pause_reading()
        ends.transport.write(bytes(8 * MIB))
        assert ends.transport.get_write_buffer_size()
        ends.reset()
        await until(lambda: ends.is_lost)
        assert ends.protocol.told == ["made", "pause", "lost"]
        assert ends.transport.get_write_buffer_size() == 0
        for other in before:
            other.client.close()
            await other.until("end", "lost")
