"""Accepts connections on a bound socket and hands them on as sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress


class AcceptedSocket(socket.socket):
    """Says its family and type as plain numbers: event loops ask for them, and `socket.socket` takes microseconds
    to make an enum of each."""

    __slots__ = ()

    family = socket.SocketType.family  # type: ignore[assignment]
    type = socket.SocketType.type  # type: ignore[assignment]


_logger = logging.getLogger(__name__)

_BACKLOG = 2048
# In one turn of the loop, so that a flood of new connections leaves time for the others.
_MAX_ACCEPTED_PER_TURN = 64
# Until the next attempt when the system lacks resources to accept.
_EXHAUSTED_PAUSE_S = 1.0


class Acceptor:
    """Runs from `start` to `close`. `take` becomes the owner of each accepted socket, which does not block.

    Not asyncio's `create_server`: it reports a connection only after the TLS handshake, a new certificate would need a
    new listener, and a socket could not be given to another process.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, bound: socket.socket, take: Callable[[socket.socket], None]
    ) -> None:
        self._loop = loop
        self._bound = bound
        self._family, self._type, self._proto = int(bound.family), int(bound.type), bound.proto
        self._take = take
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._bound.listen(_BACKLOG)
        self._resume()

    def pause(self) -> None:
        """Leave new connections in the system's backlog until `resume`. Safe to repeat."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._loop.remove_reader(self._bound)

    def resume(self) -> None:
        """Accept again. Safe to repeat."""
        self._resume()

    def close(self) -> None:
        """Accept the connections that are waiting, then no more, and close the bound socket. Safe to repeat.

        Closing the socket resets the connections of its backlog, which their clients consider open.
        """
        if self._bound.fileno() < 0:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._bound)
        self._accept_rest()
        self._bound.close()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        try:
            for _ in range(_MAX_ACCEPTED_PER_TURN):
                if not self._accept_next():
                    return
        except OSError as error:  # no descriptors or no memory left
            _logger.error("cannot accept connections, trying again in %g s: %s", _EXHAUSTED_PAUSE_S, error.strerror)
            self._loop.remove_reader(self._bound)
            self._pause = self._loop.call_later(_EXHAUSTED_PAUSE_S, self._resume)

    def _accept_rest(self) -> None:
        with suppress(OSError):  # no descriptors or no memory left: the rest is reset
            for _ in range(_BACKLOG):
                if not self._accept_next():
                    return

    def _accept_next(self) -> bool:
        """Take one connection, if one waits. Raises OSError when the system lacks resources to accept."""
        try:
            descriptor, _ = self._bound._accept()  # type: ignore[attr-defined]  # `accept` makes enums
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        accepted = AcceptedSocket(self._family, self._type, self._proto, fileno=descriptor)
        accepted.setblocking(False)
        self._take(accepted)
        return True
