"""Records that no library would send: a client that changes its keys as often, and as far, as it likes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority
from support.loops import on_both_loops
from support.raw_tls import HALF_KEY_UPDATE, HANDSHAKE, RawTls
from support.socket_ends import MIB, Kept, calls_twin, until
from support.tls_ends import SecuredEnds, Trust, authority, connected, trust

from modelserver.wire.tls import TlsFiles

__all__ = ["authority", "calls_twin", "trust"]
pytestmark = pytest.mark.usefixtures("calls_twin")


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
