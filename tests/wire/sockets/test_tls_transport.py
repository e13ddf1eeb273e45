"""TLS between a protocol and a transport of ours: both directions, and their ends."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import ssl
import weakref

import pytest
from support.loops import on_both_loops
from support.socket_ends import MIB, Kept, calls_twin, until
from support.tls_ends import Trust, authority, connected, leave, say_end, trust

from modelserver.wire.sockets.transport import receive_soon_of

__all__ = ["authority", "calls_twin", "trust"]
pytestmark = pytest.mark.usefixtures("calls_twin")


# Both directions.


@on_both_loops
@pytest.mark.parametrize("size", [7, 16384, 100_000, 4 * MIB])
@pytest.mark.parametrize("num_bytes", [1, 16384, 16385, 3 * MIB + 1])
async def test_what_is_sent_comes(trust: Trust, size: int, num_bytes: int) -> None:
    num_bytes = min(num_bytes, size * 10_000)
    data = os.urandom(num_bytes)
    async with connected(trust, Kept(size=size)) as ends:
        client = await ends.shake(trust.client)
        await asyncio.to_thread(client.sendall, data)
        await until(lambda: len(ends.protocol.received) == num_bytes)
        assert ends.protocol.received == data
        await leave(client)
        await ends.until("end", "lost")


@on_both_loops
@pytest.mark.parametrize("buffer_bytes", [None, 4096])
async def test_what_is_written_arrives_in_order(trust: Trust, buffer_bytes: int | None) -> None:
    pieces = [os.urandom(size) for size in (1, 0, 100, 16384, 16385, 131_073, 1, 2 * MIB, 5)]
    async with connected(trust, buffer_bytes=buffer_bytes) as ends:
        client = await ends.shake(trust.client)
        transport = ends.protocol.transport
        for piece in pieces:
            transport.write(piece)
        transport.writelines([memoryview(piece) for piece in pieces])
        transport.writelines([])
        transport.write(bytearray(b"last"))
        whole = b"".join(pieces) * 2 + b"last"
        assert await ends.read(len(whole)) == whole
        client.close()
        await until(lambda: ends.is_lost)
        assert ends.protocol.told.count("pause") == ends.protocol.told.count("resume")


@on_both_loops
async def test_a_client_that_does_not_read_pauses_the_writer(trust: Trust) -> None:
    async with connected(trust, buffer_bytes=4096) as ends:
        await ends.shake(trust.client)
        transport = ends.protocol.transport
        transport.set_write_buffer_limits(high=100_000, low=10)
        assert transport.get_write_buffer_limits() == (10, 100_000)
        transport.write(bytes(MIB))
        assert transport.get_write_buffer_size() > 100_000
        await ends.until("pause")
        assert await ends.read(MIB) == bytes(MIB)
        await ends.until("pause", "resume")


@on_both_loops
@pytest.mark.parametrize("end", ["unwrap", "close", None])
async def test_who_pauses_is_given_nothing_and_then_everything(trust: Trust, end: str | None) -> None:
    """Each pause comes in the middle of what was received together, with the end of the connection behind it."""
    data = os.urandom(300_000)

    def pause(protocol: Kept, news: bytes | str) -> None:
        if isinstance(news, bytes):
            protocol.transport.pause_reading()
            asyncio.get_running_loop().call_later(0.0005, protocol.transport.resume_reading)

    async with connected(trust, Kept(size=5000, act=pause)) as ends:
        client = await ends.shake(trust.client)
        ends.protocol.transport.pause_reading()
        sending = asyncio.create_task(asyncio.to_thread(client.sendall, data))
        await asyncio.sleep(0.05)
        assert ends.protocol.received == b""
        assert not ends.protocol.transport.is_reading()
        ends.protocol.transport.resume_reading()
        await sending
        if end == "unwrap":
            ends.protocol.stays_at_end = True
            await asyncio.to_thread(say_end, client)
        elif end == "close":
            socket.socket.shutdown(client, socket.SHUT_WR)  # without saying so in TLS
        await until(lambda: ends.protocol.received == data)
        if end is not None:
            await until(lambda: "end" in ends.protocol.told)
            assert ends.protocol.told.count("end") == 1


@on_both_loops
async def test_the_lookout_reads_what_comes_at_once(trust: Trust) -> None:
    async with connected(trust) as ends:
        client = await ends.shake(trust.client)
        receive_soon = receive_soon_of(ends.protocol.transport)
        assert receive_soon is not None
        receive_soon()
        assert ends.protocol.received == b""
        client.sendall(b"now")
        receive_soon()
        assert ends.protocol.received == b"now", "in this turn of the loop"
        await leave(client)
        await ends.until("end", "lost")


@on_both_loops
async def test_another_protocol_takes_over_with_what_follows(trust: Trust) -> None:
    second = Kept()

    def hand_over(protocol: Kept, news: bytes | str) -> None:
        if isinstance(news, bytes):
            protocol.transport.set_protocol(second)

    async with connected(trust, Kept(size=5, act=hand_over)) as ends:
        client = await ends.shake(trust.client)
        with pytest.raises(TypeError, match=r"expected an asyncio\.BufferedProtocol, got Protocol"):
            ends.secured.set_protocol(asyncio.Protocol())
        client.sendall(b"firstsecond")
        await until(lambda: second.received == b"second")
        assert ends.protocol.received == b"first"
        await leave(client)
        await until(lambda: second.told == ["end", "lost"])


# The ends.


@on_both_loops
@pytest.mark.parametrize("num_bytes", [10, 4 * MIB])
async def test_who_closes_loses_nothing_and_says_that_nothing_is_missing(trust: Trust, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    async with connected(trust, buffer_bytes=65536) as ends:
        client = await ends.shake(trust.client)
        client.suppress_ragged_eofs = False  # type: ignore[attr-defined]
        transport = ends.protocol.transport
        transport.write(data)
        transport.close()
        transport.close()
        transport.write(b"too late")
        transport.writelines([b"too late"])
        transport.write_eof()
        transport.resume_reading()
        assert transport.is_closing()
        assert not transport.is_reading()
        assert "lost" not in ends.protocol.told, "nothing calls back from within a call"
        assert await ends.read(num_bytes) == data
        assert await asyncio.to_thread(client.recv, 1) == b""
        await until(lambda: ends.is_lost)
        assert ends.protocol.error is None


@on_both_loops
async def test_one_direction_ends_and_the_other_goes_on(trust: Trust) -> None:
    async with connected(trust) as ends:
        client = await ends.shake(trust.client)
        client.suppress_ragged_eofs = False  # type: ignore[attr-defined]
        transport = ends.protocol.transport
        transport.write(b"last words")
        transport.write_eof()
        transport.write_eof()
        with pytest.raises(RuntimeError, match=r"cannot write after write_eof\(\)"):
            transport.write(b"more")
        assert await ends.read(10) == b"last words"
        if client.version() == "TLSv1.3":
            # OpenSSL, the client's side, sends nothing more in TLS 1.2 (RFC 5246, 7.2.1: it answers and is done).
            client.sendall(b"an answer")
            await until(lambda: ends.protocol.received == b"an answer")
        assert await asyncio.to_thread(client.recv, 1) == b""
        assert not ends.is_lost
        transport.close()
        await ends.until("lost")


@on_both_loops
@pytest.mark.parametrize("size", [10, 1000, 100_000])
async def test_who_ends_while_it_reads_still_gets_the_rest(trust: Trust, size: int) -> None:
    """OpenSSL would take what has come for a breach of the end that was just said."""
    data = os.urandom(90_000)

    def end(protocol: Kept, news: bytes | str) -> None:
        if isinstance(news, bytes):
            protocol.transport.write_eof()

    async with connected(trust, Kept(size=size, act=end)) as ends:
        client = await ends.shake(trust.client)
        ends.protocol.transport.pause_reading()
        client.sendall(data)
        ends.protocol.transport.resume_reading()
        await until(lambda: ends.protocol.received == data)
        assert await asyncio.to_thread(client.recv, 1) == b""
        await leave(client)
        await ends.until("end", "lost")
        assert ends.protocol.error is None


@on_both_loops
async def test_a_client_that_has_ended_is_still_answered(trust: Trust) -> None:
    async with connected(trust) as ends:
        ends.protocol.stays_at_end = True
        client = await ends.shake(trust.client)
        client.sendall(b"request")
        await asyncio.to_thread(say_end, client)
        await ends.until("end")
        assert ends.protocol.received == b"request"
        transport = ends.protocol.transport
        transport.resume_reading()
        assert not transport.is_reading()
        transport.write(b"answer")
        assert await ends.read(6) == b"answer"
        transport.close()
        await ends.until("end", "lost")


@on_both_loops
@pytest.mark.parametrize("end", ["unwrap", "close", "shutdown", "reset"])
async def test_a_client_that_leaves(trust: Trust, end: str) -> None:
    async with connected(trust) as ends:
        client = await ends.shake(trust.client)
        if end == "unwrap":
            await asyncio.to_thread(client.unwrap)
        elif end == "shutdown":
            socket.socket.shutdown(client, socket.SHUT_WR)
        elif end == "reset":
            ends.reset()
        else:
            client.close()
        await until(lambda: ends.is_lost)
        was_reset = isinstance(ends.protocol.error, ConnectionResetError)
        assert ends.protocol.told == ["made", *([] if was_reset else ["end"]), "lost"]
        # Who closes may have left the tickets of a session unread, which resets the connection.
        assert was_reset == (end == "reset") or end == "close"
        assert not ends.failures


@on_both_loops
async def test_bytes_that_are_no_record_end_the_connection_and_the_client_is_told(trust: Trust) -> None:
    async with connected(trust) as ends:
        client = await ends.shake(trust.client)
        socket.socket.send(client, b"\x17\x03\x03\x00\x20" + bytes(32))
        await ends.until("lost")
        assert isinstance(ends.protocol.error, ssl.SSLError)
        with pytest.raises(ssl.SSLError, match="BAD_RECORD_MAC"):
            await asyncio.to_thread(client.recv, 1)
        ends.protocol.transport.write(b"too late")
        assert not ends.failures


@on_both_loops
async def test_who_resumes_what_is_lost_reads_nothing(trust: Trust) -> None:
    def pause(protocol: Kept, news: bytes | str) -> None:
        if isinstance(news, bytes):
            protocol.transport.pause_reading()

    async with connected(trust, Kept(size=5, act=pause)) as ends:
        client = await ends.shake(trust.client)
        client.sendall(b"firstsecond")
        await until(lambda: ends.protocol.received == b"first")
        ends.reset()
        await asyncio.sleep(0.01)
        ends.protocol.transport.write(b"to nobody")
        ends.protocol.transport.resume_reading()
        await ends.until("lost")
        await asyncio.sleep(0.01)
        assert ends.protocol.received == b"first"
        assert not ends.failures


@on_both_loops
@pytest.mark.parametrize("where", ["made", "data", "later", "end"])
async def test_a_protocol_that_fails_ends_its_connection(trust: Trust, where: str) -> None:
    def fail(protocol: Kept, news: bytes | str) -> None:
        if news == where or (isinstance(news, bytes) and where == "data"):
            raise LookupError("a fault")
        if news == b"pause":
            protocol.transport.pause_reading()
            asyncio.get_running_loop().call_later(0.001, protocol.transport.resume_reading)
        if news == b"d":
            raise LookupError("a fault")

    async with connected(trust, Kept(size=5 if where == "later" else 100, act=fail)) as ends:
        client = await ends.shake(trust.client)
        if where != "made":
            client.sendall(b"paused")
        if where == "end":
            await asyncio.to_thread(say_end, client)
        await until(lambda: ends.is_lost)
        [failure] = ends.failures
        assert isinstance(failure["exception"], LookupError)


@on_both_loops
async def test_an_empty_buffer_is_the_protocols_fault(trust: Trust) -> None:
    async with connected(trust, Kept(size=0)) as ends:
        client = await ends.shake(trust.client)
        client.sendall(b"data")
        await until(lambda: ends.is_lost)
        assert "get_buffer() returned an empty buffer" in str(ends.failures[0]["exception"])


@on_both_loops
async def test_nothing_keeps_those_that_are_lost(trust: Trust) -> None:
    gc.disable()
    try:
        async with connected(trust) as ends:
            await leave(await ends.shake(trust.client))
            await ends.until("end", "lost")
            kept = [weakref.ref(each) for each in (ends.protocol, ends.secured.get_extra_info("ssl_object"))]
            asyncio.get_running_loop().set_exception_handler(None)
        del ends
        assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()


@on_both_loops
@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_when(trust: Trust, seed: int) -> None:
    """Pauses, sizes and both directions at random: all arrives, in order."""
    chance = random.Random(seed)
    there, back = (chance.randbytes(chance.randrange(1, 2 * MIB)) for _ in range(2))

    def act(protocol: Kept, news: bytes | str) -> None:
        if isinstance(news, bytes) and chance.random() < 0.2:
            protocol.transport.pause_reading()
            asyncio.get_running_loop().call_later(chance.random() / 1000, protocol.transport.resume_reading)

    async with connected(trust, Kept(size=chance.choice([1000, 16384, 70_000]), act=act)) as ends:
        ends.client.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ends.client, ssl=trust.client, server_hostname="127.0.0.1")
        writer.write(there)
        reading = asyncio.create_task(reader.readexactly(len(back)))
        await until(lambda: bool(ends.ended))
        position = 0
        while position < len(back):
            size = chance.choice([1, 100, 16384, 200_000])
            ends.protocol.transport.write(back[position : position + size])
            position += size
            await asyncio.sleep(0)
        assert await reading == back
        await until(lambda: len(ends.protocol.received) == len(there))
        assert ends.protocol.received == there
        writer.close()
        await until(lambda: ends.is_lost)
