"""Which wire carries the protocols, on how many ports, and whether behind a router: for all servers of a test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ADDRESS = "127.0.0.1"
LAYOUTS = ("native", "native-one-port", "native-processes", "grpcio", "routed")
DEFAULT = LAYOUTS[0]

_OPTIONS: dict[str, dict[str, Any]] = {"native-processes": {"wire_processes": 2}, "grpcio": {"wire": "grpcio"}}

# The innermost last.
_chosen = [DEFAULT]


def choose(name: str) -> None:
    """Servers have this layout where no block says another."""
    _chosen[0] = name


@contextmanager
def layout(name: str) -> Iterator[None]:
    """Servers that are started within the block have this layout."""
    assert name in LAYOUTS, name
    _chosen.append(name)
    try:
        yield
    finally:
        _chosen.pop()


def is_routed() -> bool:
    """A router stands in front of each server, and clients get its addresses."""
    return _chosen[-1] == "routed"


def layout_options() -> dict[str, Any]:
    """Fields of `ServerOptions` for the layout that is chosen now."""
    if _chosen[-1] == "native-one-port":
        return dict.fromkeys(("http_port", "grpc_port"), free_port())
    return _OPTIONS.get(_chosen[-1], {})


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody who asks for any for the next minute.

    A connection of its own has just ended on it: whoever names the port may bind it (SO_REUSEADDR), as servers do.
    """
    with socket.socket() as listener:
        listener.bind((ADDRESS, 0))
        # Not before, or it could be given a port that was found a moment ago.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(1)
        with socket.create_connection(listener.getsockname()) as client:
            accepted, _ = listener.accept()
            accepted.shutdown(socket.SHUT_WR)  # the end that closes first is the one that the system remembers
            client.recv(1)
        accepted.close()
        port: int = listener.getsockname()[1]
        return port
