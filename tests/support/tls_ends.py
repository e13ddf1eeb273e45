"""Both ends of a connection with TLS: a transport of ours with a protocol that keeps what it is told, and a client."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from support.certificates import Authority
from support.socket_ends import Ends, Kept, polled, until

from modelserver.wire.sockets.poller import Poller
from modelserver.wire.sockets.tls_transport import TlsTerms, TlsTransport
from modelserver.wire.sockets.transport import SocketTransport
from modelserver.wire.tls import TlsFiles

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


class SecuredEnds(Ends):
    """With TLS from `shake` on, which the protocol is made after. `ended` are the handshake's ends: one, once."""

    def __init__(
        self,
        poller: Poller,
        protocol: Kept,
        context: ssl.SSLContext,
        *,
        handshake_s: float = 10.0,
        linger_s: float = 10.0,
        buffer_bytes: int | None = None,
    ) -> None:
        self.ended: list[Exception | None] = []
        self._context = context
        self._terms = TlsTerms(handshake_s, linger_s, b"told openly")
        super().__init__(poller, protocol, buffer_bytes=buffer_bytes)

    def _begun(self, transport: SocketTransport) -> SocketTransport:
        loop = asyncio.get_running_loop()
        self.secured = TlsTransport(loop, self._context, self._terms, lambda _, error: self.ended.append(error))
        self.secured.begin(transport, self.protocol)
        return transport

    async def shake(self, trust: ssl.SSLContext) -> ssl.SSLSocket:
        """Have the client do its part; the socket that it has then is `client`, too."""
        plain = self.client
        secured = await asyncio.to_thread(trust.wrap_socket, plain, server_hostname="127.0.0.1")
        await until(lambda: bool(self.ended))
        self.client = secured
        return secured


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


async def leave(client: ssl.SSLSocket) -> None:
    """Take leave in TLS: who only closes resets the connection where a session's tickets are unread."""
    await asyncio.to_thread(client.unwrap)
    client.close()


def say_end(client: ssl.SSLSocket) -> None:
    """Say in TLS that nothing follows, and go on reading."""
    client.settimeout(0.0)
    with suppress(ssl.SSLWantReadError):
        client._sslobj.shutdown()  # type: ignore[attr-defined]  # `unwrap` would wait for the peer's
    client.settimeout(10.0)
