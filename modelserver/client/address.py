"""Where the server is, and how a connection to it is opened."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from modelserver.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    import asyncio

    from modelserver.wire.sockets.poller import Poller

CONNECT_TIMEOUT_S = 10.0
# A peer that does not answer this many probes of the system, one a second, is gone.
_SILENT_S = 3

URL_VARIABLE = "MODELSERVER_URL"
# Where Ollama's clients look for a server; counts without the other.
OLLAMA_VARIABLE = "OLLAMA_HOST"
_OLLAMA_PORT = 11434
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where servers listen is where clients do not ask
# The API key of every command that calls a server. Not a flag: other users of the machine can see flags.
KEY_VARIABLE = "MODELSERVER_API_KEY"
# PEM files: trusted authorities (default: the system's), and our certificate if a server asks for one.
CA_VARIABLE = "MODELSERVER_CA_FILE"
CERTIFICATE_VARIABLE = "MODELSERVER_CLIENT_CERT"
CERTIFICATE_KEY_VARIABLE = "MODELSERVER_CLIENT_KEY"
TLS_VARIABLES = (CA_VARIABLE, CERTIFICATE_VARIABLE, CERTIFICATE_KEY_VARIABLE)


def usual_url(given: str) -> str:
    """The URL that was given by a flag or a variable; that of OLLAMA_HOST in the forms that Ollama takes.

    These are `host`, `host:port` and a URL, with Ollama's port where a host has none.
    """
    if os.environ.get(URL_VARIABLE) or not given or given != os.environ.get(OLLAMA_VARIABLE):
        return given
    scheme, separator, rest = given.strip().strip("\"'").rpartition("://")
    usual_port = {"": _OLLAMA_PORT, "https": 443}.get(scheme if separator else "", 80)
    try:
        parts = urlsplit(f"//{rest.partition('/')[0]}")
        host, port = parts.hostname or "127.0.0.1", parts.port or usual_port
    except ValueError:
        raise InvalidArgumentError(f"{OLLAMA_VARIABLE} expects <host>:<port>, got '{given:.200}'") from None
    host = _ANY_HOST.get(host, host)
    return f"{scheme or 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files are PEM; empty means the system's authorities, or no certificate of our own."""

    authorities_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    is_peer_verified: bool = True
    is_host_verified: bool = True
    # The name that the server's certificate must have, where it is not the host's.
    server_name: str = ""

    def context(self, protocol: str) -> ssl.SSLContext:
        """A context that offers `protocol` by ALPN. Raises InvalidArgumentError when a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.authorities_file or None)
            if self.certificate_file:
                context.load_cert_chain(self.certificate_file, self.key_file or None)
        except (OSError, ssl.SSLError) as error:
            names = [name for name in (self.authorities_file, self.certificate_file, self.key_file) if name]
            raise InvalidArgumentError(f"cannot use the TLS files {', '.join(names)}: {error}") from None
        if not (self.is_peer_verified and self.is_host_verified):
            context.check_hostname = False
        if not self.is_peer_verified:
            context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols([protocol])
        return context


@dataclass(frozen=True, slots=True)
class Address:
    """A host and port, or the path of a Unix socket; with TLS if `tls` is there."""

    host: str
    port: int
    tls: Tls | None = None
    unix_path: str = ""

    def __str__(self) -> str:
        return f"unix:{self.unix_path}" if self.unix_path else self.authority

    @property
    def authority(self) -> str:
        """The host and port as requests name them."""
        if self.unix_path:
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    async def open(
        self,
        factory: Callable[[], asyncio.BaseProtocol],
        context: ssl.SSLContext | None,
        timeout_s: float,
        poller: Poller | None = None,
    ) -> None:
        """Open a connection for the protocol that `factory` makes. Raises OSError, of which TimeoutError is one.

        With a `poller` a connection without TLS gets our own transport, for an `asyncio.BufferedProtocol`.
        """
        import asyncio  # here, because most commands ask once, over http.client, and should answer at once

        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            if self.unix_path:
                await loop.create_unix_connection(factory, self.unix_path)
                return
            opened = await self._open_socket(loop)
            try:
                if context is not None:
                    name = (self.tls.server_name if self.tls is not None else "") or self.host
                    await loop.create_connection(factory, sock=opened, ssl=context, server_hostname=name)
                elif poller is None:
                    await loop.create_connection(factory, sock=opened)
                else:
                    from modelserver.wire.sockets.transport import SocketTransport

                    SocketTransport(loop, poller, opened).begin(cast("asyncio.BufferedProtocol", factory()))
            except BaseException:
                opened.close()
                raise

    async def _open_socket(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        """A connected socket. Raises OSError."""
        failure = OSError("the name has no address")
        found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, place in found:
            opened = socket.socket(family, kind, protocol)
            try:
                opened.setblocking(False)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _watch_for_silence(opened)
                await loop.sock_connect(opened, place)
            except OSError as error:
                opened.close()
                failure = error
            except BaseException:
                opened.close()
                raise
            else:
                return opened
        raise failure

    async def connect(self, factory: Callable[[], asyncio.BaseProtocol], alpn: str) -> None:
        """Open a connection for the protocol that `factory` makes. Raises UnavailableError."""
        context = self.tls.context(alpn) if self.tls is not None else None
        try:
            await self.open(factory, context, CONNECT_TIMEOUT_S)
        except TimeoutError:
            raise UnavailableError(f"no answer from {self} within {CONNECT_TIMEOUT_S:g} s") from None
        except ConnectionRefusedError:
            raise refused(str(self)) from None
        except ssl.SSLError as error:
            raise UnavailableError(f"no TLS with {self}: {error}") from None
        except OSError as error:
            raise UnavailableError(f"cannot connect to {self}: {error}") from None


def parse_address(text: str, *, default_port: int, tls: Tls | None = None) -> Address:
    """`host`, `host:port`, `[v6]:port`, with or without a scheme. Raises InvalidArgumentError."""
    scheme, has_scheme, rest = text.rpartition("://")
    rest = rest.rstrip("/")
    if has_scheme and scheme not in ("http", "https", "grpc", "grpcs"):
        raise InvalidArgumentError(f"-u expects host:port, got '{text}'")
    if scheme in ("https", "grpcs"):
        tls = tls or Tls()
    host, colon, port = rest.rpartition(":")
    if not colon or rest.endswith("]"):
        host, port = rest, str(default_port)
    if not host or "/" in rest or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgumentError(f"-u expects host:port, got '{text}'")
    return Address(host.strip("[]"), int(port), tls)


def connect_failure(error: OSError, timeout_s: float) -> str:
    """Why a connection was not opened, without the address."""
    if isinstance(error, TimeoutError):
        return f"no connection within {timeout_s:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return f"no TLS: {error}" if isinstance(error, ssl.SSLError) else f"no connection: {error}"


def _watch_for_silence(opened: socket.socket) -> None:
    """Have the system end the connection when the peer's machine is gone, idle or not."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", _SILENT_S)):
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def check_files(tls: Tls) -> None:
    """Raises InvalidArgumentError for a file that is not there."""
    for name in (tls.authorities_file, tls.certificate_file, tls.key_file):
        if name and not Path(name).is_file():
            raise InvalidArgumentError(f"there is no file '{name}'")


def environment_tls() -> Tls:
    """The TLS files that the variables name."""
    authorities, certificate, key = (os.environ.get(name, "") for name in TLS_VARIABLES)
    return Tls(authorities, certificate, key)


def environment_headers() -> dict[str, str]:
    """The header of the API key, if there is one. In lower case, as HTTP/2 requires."""
    key = os.environ.get(KEY_VARIABLE, "")
    return {"authorization": f"Bearer {key}"} if key else {}


def refused(where: str) -> UnavailableError:
    """The error for an address on which no server listens."""
    return UnavailableError(
        f"no server answers at {where}: connection refused; start one with "
        f"'modelserver serve --model-repository=DIRECTORY', or say where it is with --url or {URL_VARIABLE}"
    )
