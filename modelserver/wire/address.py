"""Where a port listens: the socket, and the flags that an operator changes when it is not available."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from dataclasses import dataclass

from modelserver.errors import UnavailableError

# The most unread bytes per client that the system buffers for us.
MAX_UNSENT_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Address:
    """`port` 0 is any free one; `port_flag` is the flag to change when the port is taken.

    `service` is what errors call the port's server, as Triton does: HTTP, GRPC, Metrics.
    """

    host: str
    port: int
    port_flag: str = "--http-port"
    reuse_port: bool = False
    service: str = "HTTP"

    @property
    def address_flag(self) -> str:
        return self.port_flag.replace("-port", "-address")

    def bind(self) -> socket.socket:
        """A bound socket that does not block. Raises UnavailableError, naming the flag, if it cannot be bound."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            bound = socket.socket(family, kind, protocol)
        except OSError as error:
            raise self._error(_reason(error), f"choose another address with {self.address_flag}") from error
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "linux":
                # Accepted sockets inherit it. Without it, each takes 2.6 MB at once; bytes on their way do not count.
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
                # Answers do not wait for the acknowledgement of earlier ones.
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.reuse_port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(address)
        except OSError as error:
            bound.close()
            reason, advice = _reason(error), f"choose another port with {self.port_flag}"
            if error.errno == errno.EADDRINUSE:
                reason = "already in use"
            elif error.errno == errno.EADDRNOTAVAIL:
                advice = f"this machine has no such address, choose another with {self.address_flag}"
            raise self._error(reason, advice) from error
        bound.setblocking(False)
        return bound

    def _error(self, reason: str, advice: str) -> UnavailableError:
        socket_name = f"Socket '{authority(self.host, self.port)}'"
        return UnavailableError(
            f"failed to start {self.service} service: Unavailable - {socket_name} {reason}; {advice}"
        )


def _reason(error: OSError) -> str:
    return f"cannot be listened on: {error.strerror or error}"


def authority(host: str, port: int) -> str:
    """`host:port` as URLs write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer_of(transport: asyncio.BaseTransport) -> str:
    """The peer as `host:port`; empty if the transport does not know it."""
    name = transport.get_extra_info("peername")
    return authority(name[0], name[1]) if isinstance(name, tuple) and len(name) >= 2 else ""
