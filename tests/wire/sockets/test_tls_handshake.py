"""TLS handshakes: those that succeed, those that fail, and what is no TLS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from support.certificates import Authority
from support.loops import on_both_loops
from support.socket_ends import Kept, calls_twin, until
from support.tls_ends import SecuredEnds, Trust, authority, connected, leave, trust

from modelserver.wire.sockets.transport import gathers

__all__ = ["authority", "calls_twin", "trust"]
pytestmark = pytest.mark.usefixtures("calls_twin")


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
        await leave(client)
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
