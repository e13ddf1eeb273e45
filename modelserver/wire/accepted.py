"""The socket of a connection that was accepted."""

from __future__ import annotations

import socket


class AcceptedSocket(socket.socket):
    """Says its family and type as plain numbers: event loops ask for them, and `socket.socket` takes microseconds
    to make an enum of each."""

    __slots__ = ()

    family = socket.SocketType.family  # type: ignore[assignment]
    type = socket.SocketType.type  # type: ignore[assignment]
