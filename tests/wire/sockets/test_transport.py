"""Our transport keeps to what asyncio's promise to protocols; over real sockets, on both loops, with both twins."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import weakref

import pytest
from support.loops import on_both_loops
from support.socket_ends import Ends, Kept, calls_twin, polled, until

from modelserver.wire.sockets.transport import SocketTransport, gathers, receive_soon_of

__all__ = ["calls_twin"]
pytestmark = pytest.mark.usefixtures("calls_twin")

MIB = 1 << 20


def is_told(ends: Ends, news: str) -> bool:
    return news in ends.protocol.told


# Reading.


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
            await until(lambda ends=ends: is_told(ends, "lost"))
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
            await until(lambda ends=ends: is_told(ends, "lost"))
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
            await until(lambda ends=ends: ends.protocol.received != b"" or is_told(ends, "lost"))
            ends.transport.resume_reading()
        for ends in all_ends:
            await until(lambda ends=ends: is_told(ends, "lost"))


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
        await until(lambda: is_told(ends, "lost"))
        assert ends.protocol.told == ["made", "pause", "lost"]
        assert ends.transport.get_write_buffer_size() == 0
        for other in before:
            other.client.close()
            await other.until("end", "lost")


# Writing.


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
        await until(lambda: is_told(ends, "lost"))


@on_both_loops
async def test_limits_count_when_they_are_set() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept(), buffer_bytes=65536)
        assert ends.transport.get_write_buffer_limits() == (16 * 1024, 64 * 1024)
        ends.transport.set_write_buffer_limits(high=100 * MIB)
        assert ends.transport.get_write_buffer_limits() == (25 * MIB, 100 * MIB)
        ends.transport.write(bytes(8 * MIB))
        assert not is_told(ends, "pause")
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
        await until(lambda: is_told(ends, "lost"))


# The end.


@on_both_loops
@pytest.mark.parametrize("num_bytes", [10, 4 * MIB])
async def test_who_closes_loses_nothing_of_what_was_written(num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    with polled() as poller:
        ends = Ends(poller, Kept(), buffer_bytes=65536)
        ends.transport.write(data)
        ends.transport.close()
        ends.transport.close()
        ends.transport.write(b"too late")
        ends.transport.writelines([b"too late"])
        ends.transport.write_eof()
        ends.transport.resume_reading()
        assert ends.transport.is_closing()
        assert not ends.transport.is_reading()
        assert "lost" not in ends.protocol.told, "nothing calls back from within a call"
        assert await ends.read(num_bytes) == data
        assert await asyncio.to_thread(ends.client.recv, 1) == b""
        await until(lambda: is_told(ends, "lost"))
        assert ends.protocol.told.count("lost") == 1
        assert ends.protocol.error is None
        ends.client.close()


@on_both_loops
async def test_who_aborts_drops_what_waits() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept(), buffer_bytes=65536)
        ends.transport.write(bytes(8 * MIB))
        ends.transport.abort()
        ends.transport.abort()
        ends.transport.close()
        assert ends.transport.get_write_buffer_size() == 0
        await ends.until("pause", "lost")
        received = 0
        while data := await asyncio.to_thread(ends.client.recv, MIB):
            received += len(data)
        assert received < 8 * MIB
        ends.client.close()


@on_both_loops
@pytest.mark.parametrize("end", ["close", "abort"])
async def test_who_ends_while_it_is_made_reads_nothing(end: str) -> None:
    def leave(protocol: Kept, news: bytes | str) -> None:
        if news == "made":
            getattr(protocol.transport, end)()

    with polled() as poller:
        ends = Ends(poller, Kept(act=leave), say=b"unread")
        await ends.until("lost")
        assert ends.protocol.received == b""
        ends.client.close()


@on_both_loops
@pytest.mark.parametrize("where", ["made", "data", "end", "pause"])
@pytest.mark.parametrize("num_before", [0, 6])
async def test_a_protocol_that_fails_ends_its_own_connection_only(where: str, num_before: int) -> None:
    def stumble(_protocol: Kept, news: bytes | str) -> None:
        if news == where or (isinstance(news, bytes) and where == "data"):
            raise ZeroDivisionError(where)

    with polled() as poller:
        before = [Ends(poller, Kept()) for _ in range(num_before)]
        ends = Ends(poller, Kept(act=stumble))
        after = Ends(poller, Kept())
        if where == "data":
            ends.client.sendall(b"x")
        elif where == "end":
            ends.client.shutdown(socket.SHUT_WR)
        elif where == "pause":
            ends.transport.write(bytes(16 * MIB))
        for other in (*before, after):
            other.client.sendall(b"x")
            await until(lambda other=other: other.protocol.received == b"x")
        await until(lambda: is_told(ends, "lost"))
        assert isinstance(ends.protocol.error, ZeroDivisionError)
        (failure,) = ends.failures + after.failures
        assert failure["message"] == "a protocol failed"
        assert failure["exception"] is ends.protocol.error
        for other in (*before, after, ends):
            other.client.close()
        for other in (*before, after):
            await other.until("end", "lost")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("num_before", [0, 6])
def test_who_interrupts_the_process_is_not_held_up(error: type[BaseException], num_before: int) -> None:
    def interrupt(_protocol: Kept, news: bytes | str) -> None:
        if news == b"x":
            raise error

    all_ends: list[Ends] = []

    async def scenario() -> None:
        with polled() as poller:
            all_ends.extend(Ends(poller, Kept(act=interrupt)) for _ in range(num_before + 1))
            all_ends[-1].client.sendall(b"x")
            await asyncio.sleep(10)

    with pytest.raises(error):
        asyncio.run(scenario())
    for ends in all_ends:
        assert ends.protocol.told == ["made"]
        ends.client.close()
        ends.accepted.close()


@on_both_loops
@pytest.mark.parametrize("num_before", [0, 6])
async def test_a_protocol_without_room_has_failed(num_before: int) -> None:
    with polled() as poller:
        before = [Ends(poller, Kept()) for _ in range(num_before)]
        ends = Ends(poller, Kept(0))
        ends.client.sendall(b"x")
        await until(lambda: is_told(ends, "lost"))
        assert ends.protocol.told == ["made", "lost"]
        assert "empty buffer" in str(ends.protocol.error)
        for other in (*before, ends):
            other.client.close()
        for other in before:
            await other.until("end", "lost")


@on_both_loops
async def test_a_descriptor_that_is_used_again_is_not_taken_for_the_one_it_was() -> None:
    with polled() as poller:
        for _ in range(300):
            ends = Ends(poller, Kept(), say=b"x")
            number = ends.accepted.fileno()
            ends.transport.abort()
            ends.client.close()
            await ends.until("lost")
            again = Ends(poller, Kept())
            again.client.sendall(b"y")
            await until(lambda again=again: again.protocol.received == b"y")
            assert ends.protocol.received == b"x"
            again.client.close()
            await again.until("end", "lost")
            assert number >= 0


@on_both_loops
async def test_a_lost_connection_is_not_kept() -> None:
    with polled() as poller:
        all_ends = [Ends(poller, Kept()) for _ in range(8)]
        for ends in all_ends:
            ends.client.close()
        for ends in all_ends:
            await ends.until("end", "lost")
        kept = [weakref.ref(ends.protocol) for ends in all_ends]
        asyncio.get_running_loop().set_exception_handler(None)
        gc.disable()  # what a connection has read of its client is not to lie about until a collection
        try:
            del ends
            all_ends.clear()
            await asyncio.sleep(0.01)
            assert not [reference for reference in kept if reference() is not None]
        finally:
            gc.enable()


# Who is who.


@on_both_loops
async def test_it_says_who_is_connected() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept())
        transport = ends.transport
        assert transport.get_extra_info("peername") == ends.client.getsockname()
        assert transport.get_extra_info("sockname") == ends.client.getpeername()
        assert transport.get_extra_info("socket") is ends.accepted
        assert transport.get_extra_info("ssl_object") is None
        assert transport.get_extra_info("ssl_object", 7) == 7
        assert transport.can_write_eof()
        assert gathers(transport)
        assert not gathers(asyncio.Transport())
        assert receive_soon_of(asyncio.Transport()) is None
        ends.client.close()
        await ends.until("end", "lost")
        assert transport.get_extra_info("peername") is not None, "it is remembered"


@on_both_loops
async def test_who_has_left_has_no_name() -> None:
    with polled() as poller:
        ends = Ends(poller, Kept())
        ends.reset()
        await ends.until("lost")
        assert ends.transport.get_extra_info("peername") is None
        assert ends.transport.get_extra_info("peername", "?") == "?"


async def test_a_socket_that_cannot_be_watched_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with polled() as poller:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no room")

        monkeypatch.setattr(poller, "watch", refuse)
        ends = Ends(poller, Kept())
        await ends.until("lost")
        assert isinstance(ends.protocol.error, OSError)
        ends.client.close()


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
        await until(lambda: is_told(ends, "lost"))
        assert isinstance(ends.transport, SocketTransport)
