"""The system calls of a transport: in C if that was built (`_calls.c`), else in Python; the result is the same.

None of these waits, except `receive_soon` for the time that it is given. Those in C hold the interpreter's lock, which
those in Python let go of each time: a worker that waits for it is then woken, mostly for nothing.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from modelserver.core.accelerator import load_extension
from modelserver.core.tensor import Buffer

READ: Final = getattr(select, "EPOLLIN", 1)
WRITE: Final = getattr(select, "EPOLLOUT", 4)
# The result of `receive` when no data has arrived.
NOTHING: Final = -1
# Sockets that are served in one turn of the loop; then timers and the answers of workers have theirs.
_MAX_READY: Final = 64


class Watched(Protocol):
    """A transport that receives events of its socket. None of these methods raises."""

    __slots__ = ()

    def ready(self, events: int) -> None:
        """The socket can be read (READ) or written (WRITE), or has failed (any other bit); or perhaps so: try."""

    def lose(self, error: Exception | None) -> None:
        """Reading has failed."""

    def fail(self, error: Exception) -> None:
        """The protocol has raised."""


# The watcher of a socket, and the protocol that may get received data directly; None while it must not read.
Watcher = tuple[Watched, asyncio.BufferedProtocol | None]


def receive_in_python(descriptor: int, buffer: memoryview) -> int:
    """Receive into `buffer`. Returns the number of bytes, 0 at the end, NOTHING if none has arrived. Raises OSError."""
    try:
        return os.readv(descriptor, (buffer,))
    except BlockingIOError:
        return NOTHING


def receive_soon_in_python(descriptor: int, buffer: memoryview, _patience_ns: int) -> int:
    """As `receive`, for data that arrives within `_patience_ns`, while other threads run; it may give up earlier."""
    return receive_in_python(descriptor, buffer)


def transmit_in_python(descriptor: int, data: Buffer) -> int:
    """Send as much of `data` as the system takes at once. Returns the number of bytes, perhaps 0. Raises OSError."""
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0


def serve_one_in_python(_descriptor: int, watcher: Watcher) -> None:
    """This socket can be read: give its protocol what has come.

    Again where there was something: uvloop watches a socket no more that was reset, and with the last bytes of the peer
    comes the reset that is behind them.
    """
    watcher[0].ready(READ)
    watcher[0].ready(READ)


def serve_in_python(epoll: select.epoll, watchers: Mapping[int, Watcher]) -> None:
    """Do so for those that are ready in the set, some of them if they are many. `watchers` is by descriptor."""
    for descriptor, events in epoll.poll(0, _MAX_READY):
        watcher = watchers.get(descriptor)
        if watcher is not None:  # one of those before it may have ended it
            watcher[0].ready(events)


_MODULE: Final[Any] = load_extension(f"{__package__}._calls", os.environ)
receive: Callable[[int, memoryview], int] = receive_in_python if _MODULE is None else _MODULE.receive
receive_soon: Callable[[int, memoryview, int], int] = (
    receive_soon_in_python if _MODULE is None else _MODULE.receive_soon
)
transmit: Callable[[int, Buffer], int] = transmit_in_python if _MODULE is None else _MODULE.transmit
serve_one: Callable[[int, Watcher], None] = serve_one_in_python if _MODULE is None else _MODULE.serve_one
serve: Callable[[select.epoll, Mapping[int, Watcher]], None] = serve_in_python if _MODULE is None else _MODULE.serve
