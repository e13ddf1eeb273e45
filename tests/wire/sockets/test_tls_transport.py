"""TLS between a protocol and a transport of ours: handshakes, both directions and their ends, and what is no TLS."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import ssl
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority
from support.loops import on_both_loops
from support.raw_tls import HALF_KEY_UPDATE, HANDSHAKE, RawTls
from support.socket_ends import MIB, Kept, SecuredEnds, calls_twin, polled, until

from modelserver.wire.sockets.transport import gathers, receive_soon_of
from modelserver.wire.tls import TlsFiles

__all__ = ["calls_twin"]
pytestmark = pytest.mark.usefixtures("calls_twin")

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@dataclass(frozen=True)
class Trust:
    """What a server shows, and a client that believes it."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=VERSIONS, ids=["1.2", "1.3"])
def trust(request: pytest.FixtureRequest, authority: Authority) -> Trust:
    pair = authority.pair("server")
    client = authority.client_context(("http/1.1",))
    client.minimum_version = client.maximum_version = request.param
    return Trust(TlsFiles(str(pair.certificate), str(pair.key)).context(), client)


@asynccontextmanager
async def connected(trust: Trust, protocol: Kept | None = None, **details: Any) -> AsyncIterator[SecuredEnds]:
    """Both ends, before the handshake. Nothing is left of them behind it."""
    with polled() as poller:
        ends = SecuredEnds(poller, protocol or Kept(), trust.server, **details)
        try:
            yield ends
        finally:
            ends.client.close()
            ends.secured.abort()
            await until(lambda: ends.accepted.fileno() == -1)


async def _leave(client: ssl.SSLSocket) -> None:
    """Take leave in TLS: who only closes resets the connection where a session's tickets are unread."""
    await asyncio.to_thread(client.unwrap)
    client.close()


# The handshake.


@on_both_loops
async def test_a_protocol_is_made_when_the_handshake_is_done(trust: Trust) -> None:
    async with connected(trust) as ends:
        assert ends.protocol.told == []
        client = await ends.shake(trust.client)
        assert ends.protocol.told == ["made"]
        assert ends.ended == [None]
        transport = ends.protocol.transport
        assert transport is ends.secured
        assert transport.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
        assert transport.get_extra_info("ssl_object").version() == client.version()
        assert transport.get_extra_info("peername") == client.getsockname()
        assert transport.get_extra_info("nothing", 7) == 7
        assert not gathers(transport)
        assert transport.can_write_eof()
        assert transport.get_protocol() is ends.protocol
        await _leave(client)
        await ends.until("end", "lost")


@on_both_loops
async def test_a_handshake_in_single_bytes_with_the_first_request_behind_it(trust: Trust) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust.client.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")

    async def send_slowly(ends: SecuredEnds) -> None:
        for byte in outgoing.read():
            ends.client.sendall(bytes((byte,)))
            await asyncio.sleep(0)

    async with connected(trust, Kept(size=7)) as ends:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                await send_slowly(ends)
                incoming.write(await asyncio.to_thread(ends.client.recv, 65536))
        client.write(b"at once")
        await send_slowly(ends)
        await until(lambda: ends.protocol.received == b"at once")
        ends.client.close()
        await until(lambda: ends.is_lost)


@on_both_loops
@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"told openly"),
        (b"DELETE / HTTP/1.1\r\n\r\n", b"told openly"),
        (b"POST / HTTP/1.1\r\nContent-Length: 3000000\r\n\r\n" + bytes(3_000_000), b"told openly"),
        (b"\0" * 100, b""),
    ],
    ids=["get", "delete", "post", "something"],
)
async def test_what_is_no_tls_fails_the_handshake_and_is_told(trust: Trust, said: bytes, answer: bytes) -> None:
    async with connected(trust) as ends:
        await asyncio.to_thread(ends.client.sendall, said)
        answers = [await asyncio.to_thread(ends.client.recv, 1000)]
        while answers[-1]:
            answers.append(await asyncio.to_thread(ends.client.recv, 1000))
        assert b"".join(answers).startswith(answer)
        assert ends.ended == [], "the client may still be reading"
        ends.client.close()
        await until(lambda: bool(ends.ended))
        assert isinstance(ends.ended[0], ssl.SSLError)
        assert ends.protocol.told == []
        assert not ends.failures


@on_both_loops
async def test_a_failed_handshake_does_not_linger_for_ever(trust: Trust) -> None:
    async with connected(trust, linger_s=0.05) as ends:
        ends.client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: bool(ends.ended))
        assert isinstance(ends.ended[0], ssl.SSLError)
        await until(lambda: ends.accepted.fileno() == -1)


@on_both_loops
async def test_a_client_that_does_not_believe_the_server(trust: Trust, tmp_path: Path) -> None:
    async with connected(trust) as ends:
        with pytest.raises(ssl.SSLCertVerificationError):
            await ends.shake(Authority(tmp_path, "other").client_context())
        await until(lambda: bool(ends.ended))
        assert "UNKNOWN_CA" in str(ends.ended[0])
        assert ends.protocol.told == []


@on_both_loops
async def test_a_client_is_told_what_was_wrong_with_its_handshake(trust: Trust, authority: Authority) -> None:
    async with connected(trust) as ends:
        weak = authority.client_context()
        weak.maximum_version = ssl.TLSVersion.TLSv1_2
        weak.set_ciphers("AES128-SHA")
        with pytest.raises(ssl.SSLError, match="HANDSHAKE_FAILURE"):
            await ends.shake(weak)
        await until(lambda: bool(ends.ended))
        assert "NO_SHARED_CIPHER" in str(ends.ended[0])


@on_both_loops
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01"])
async def test_a_handshake_that_takes_too_long(trust: Trust, said: bytes) -> None:
    async with connected(trust, handshake_s=0.05) as ends:
        ends.client.sendall(said)
        assert await asyncio.to_thread(ends.client.recv, 1) == b""
        assert [str(error) for error in ends.ended] == ["it was not done within 0.05 s"]
        assert ends.protocol.told == []


@on_both_loops
@pytest.mark.parametrize("end", ["close", "reset"])
async def test_a_client_that_leaves_before_it_is_known(trust: Trust, end: str) -> None:
    async with connected(trust) as ends:
        ends.client.sendall(b"\x16\x03\x01\x02\x00\x01")
        if end == "reset":
            ends.reset()
        ends.client.close()
        await until(lambda: bool(ends.ended))
        assert isinstance(ends.ended[0], ConnectionResetError)
        assert ends.protocol.told == []


@on_both_loops
async def test_who_aborts_a_handshake_hears_of_its_end_once(trust: Trust) -> None:
    async with connected(trust) as ends:
        ends.secured.abort()
        ends.secured.abort()
        ends.secured.close()
        assert await asyncio.to_thread(ends.client.recv, 1) == b""
        assert len(ends.ended) == 1


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
        await _leave(client)
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
            await asyncio.to_thread(_say_end, client)
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
        await _leave(client)
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
        await _leave(client)
        await until(lambda: second.told == ["end", "lost"])


# The ends.


def _say_end(client: ssl.SSLSocket) -> None:
    """Say in TLS that nothing follows, and go on reading."""
    client.settimeout(0.0)
    with suppress(ssl.SSLWantReadError):
        client._sslobj.shutdown()  # type: ignore[attr-defined]  # `unwrap` would wait for the peer's
    client.settimeout(10.0)


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
        await _leave(client)
        await ends.until("end", "lost")
        assert ends.protocol.error is None


@on_both_loops
async def test_a_client_that_has_ended_is_still_answered(trust: Trust) -> None:
    async with connected(trust) as ends:
        ends.protocol.stays_at_end = True
        client = await ends.shake(trust.client)
        client.sendall(b"request")
        await asyncio.to_thread(_say_end, client)
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


# What no library would send.


@asynccontextmanager
async def raw(
    authority: Authority, tmp_path: Path, protocol: Kept | None = None, **details: Any
) -> AsyncIterator[tuple[SecuredEnds, RawTls]]:
    pair = authority.pair("server")
    client = authority.client_context()
    trust = Trust(TlsFiles(str(pair.certificate), str(pair.key)).context(), client)
    async with connected(trust, protocol, **details) as ends:
        yield ends, await asyncio.to_thread(RawTls, ends.client, client, tmp_path / "keys")


@on_both_loops
@pytest.mark.parametrize("num_bytes", [10, 4 * MIB])
async def test_half_a_change_of_keys_ends_the_connection_and_raises_nothing(
    authority: Authority, tmp_path: Path, num_bytes: int
) -> None:
    """OpenSSL sends nothing until the other half comes."""
    async with raw(authority, tmp_path) as (ends, client):
        client.send(client.record(b"request"), client.record(HALF_KEY_UPDATE, HANDSHAKE))
        await until(lambda: ends.protocol.received == b"request")
        await asyncio.sleep(0.01)
        ends.protocol.transport.write(bytes(num_bytes))
        assert ends.protocol.transport.is_closing()
        ends.protocol.transport.write(b"more")
        await ends.until("lost")
        assert isinstance(ends.protocol.error, ssl.SSLError)
        assert not ends.failures


@on_both_loops
async def test_changes_of_keys_behind_our_end(authority: Authority, tmp_path: Path) -> None:
    async with raw(authority, tmp_path) as (ends, client):
        ends.protocol.transport.write_eof()
        client.send(client.key_update(), client.key_update(), client.record(b"with other keys"))
        await until(lambda: ends.protocol.received == b"with other keys")
        assert not ends.failures


@on_both_loops
async def test_changes_of_keys_that_nobody_reads_the_answers_to(authority: Authority, tmp_path: Path) -> None:
    async with raw(authority, tmp_path, buffer_bytes=4096) as (ends, client):
        ends.protocol.transport.write(bytes(4 * MIB))
        for _ in range(1000):
            if ends.is_lost:
                break
            with suppress(ConnectionError):
                await asyncio.to_thread(client.send, *(client.key_update() for _ in range(100)))
        await until(lambda: ends.is_lost)
        assert not ends.failures


@on_both_loops
async def test_changes_of_keys_that_are_read_go_on(authority: Authority, tmp_path: Path) -> None:
    async with raw(authority, tmp_path) as (ends, client):
        for _ in range(100):
            client.send(*(client.key_update() for _ in range(100)))
            assert await asyncio.to_thread(client.socket.recv, 1 << 20)
        client.send(client.record(b"still here"))
        await until(lambda: ends.protocol.received == b"still here")


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
            await asyncio.to_thread(_say_end, client)
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
            await _leave(await ends.shake(trust.client))
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
