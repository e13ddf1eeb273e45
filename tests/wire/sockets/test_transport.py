"""How a transport of ours ends, and who it is. It keeps to what asyncio's promise to protocols."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import weakref

import pytest
from support.loops import on_both_loops
from support.socket_ends import MIB, Ends, Kept, calls_twin, polled, until

from modelserver.wire.sockets.transport import gathers, receive_soon_of

__all__ = ["calls_twin"]
pytestmark = pytest.mark.usefixtures("calls_twin")


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
        await until(lambda: ends.is_lost)
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
        await until(lambda: ends.is_lost)
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
        await until(lambda: ends.is_lost)
        assert ends.protocol.told == ["made", "lost"]
        assert "empty buffer" in str(ends.protocol.error)
        for other in (*before, ends):
            other.client.close()
        for other in before:
            await other.until("end", "lost")


@on_both_loops
async def test_a_descriptor_that_is_used_again_is_not_taken_for_the_one_it_was() -> None:
    num_used_again = 0
    with polled() as poller:
        for _ in range(300):
            ends = Ends(poller, Kept(), say=b"x")
            number = ends.accepted.fileno()
            ends.transport.abort()
            ends.client.close()
            await ends.until("lost")
            again = Ends(poller, Kept())
            num_used_again += again.accepted.fileno() == number
            again.client.sendall(b"y")
            await until(lambda again=again: again.protocol.received == b"y")
            assert ends.protocol.received == b"x"
            again.client.close()
            await again.until("end", "lost")
    assert num_used_again


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
