"""Listening for HTTP on one address, whichever protocol reads the connections."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from modelserver.errors import UnavailableError

_BACKLOG = 2048
_ABORT_WAIT_S = 1.0

# The request line and headers of one request: the parser has no limit of its own.
MAX_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How to listen. `port_flag` is what an operator changes when the port is taken."""

    reuse_port: bool = False
    max_body_bytes: int = 64 * 1024 * 1024
    port_flag: str = "--http-port"
    # Longer than the usual idle timeout of proxies, so that it is they who close.
    keep_alive_s: float = 65.0
    # How long a client may pause in the middle of a request.
    receive_timeout_s: float = 60.0


class Connection(Protocol):
    """One open connection, as its listener sees it."""

    # Done when the connection is gone.
    closed: asyncio.Future[None]

    def shutdown(self) -> None:
        """Take no further request; close once the ones that came are answered."""

    def abort(self) -> None:
        """Close now, whatever is in progress."""


class HttpListener:
    """Accepts connections from `start` to `stop`. Everything happens on the event loop that calls `start`.

    `accept()` makes the protocol of a new connection; `connections` are those that are open.
    """

    def __init__(self, host: str, port: int, options: HttpOptions) -> None:
        self.options = options
        self.port = port
        self._host = host
        self._listener: asyncio.AbstractServer | None = None

    async def start(self, accept: Callable[[], asyncio.Protocol]) -> None:
        """Listen; `port` is the real one from here on.

        Raises UnavailableError, naming the flag, when the address cannot be had.
        """
        bound = _bind(self._host, self.port, self.options)
        self.port = bound.getsockname()[1]
        self._listener = await asyncio.get_running_loop().create_server(accept, sock=bound, backlog=_BACKLOG)

    async def stop(self, connections: set[Connection], grace_s: float) -> None:
        """Accept no more, let requests in flight finish for `grace_s`, then cut what is left."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.close()
        for connection in list(connections):
            connection.shutdown()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=grace_s)
        left = list(connections)
        for connection in left:
            connection.abort()
        if left:
            await asyncio.wait([connection.closed for connection in left], timeout=_ABORT_WAIT_S)
        await listener.wait_closed()


def _bind(host: str, port: int, options: HttpOptions) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        flag = options.port_flag.replace("-port", "-address")
        reason = error.strerror or str(error)
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {reason}; choose another address with {flag}"
        ) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if options.reuse_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        flag = options.port_flag
        if error.errno == errno.EADDRNOTAVAIL:
            flag = flag.replace("-port", "-address")
            advice = f"this machine has no such address, choose another with {flag}"
        else:
            advice = f"choose another port with {flag}"
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from error
    bound.setblocking(False)
    return bound
