"""Which sockets of a port can be read or written: one set for nearly all of them, looked at once in a turn of the loop.

The event loop watches the set, and calls once for all sockets that are ready. Where it watches them itself it calls for
each: it takes the interpreter's lock and lets go of it, and a worker thread that waits for the lock is woken each time,
mostly for nothing.
"""

from __future__ import annotations

import asyncio
import select
import sys
from contextlib import suppress
from typing import Final

from modelserver.wire.sockets import calls
from modelserver.wire.sockets.calls import READ, WRITE, Watcher

# The loop itself watches up to this many sockets: a look into the set takes a microsecond, which pays off only with
# more. Without epoll the loop watches all of them.
_MAX_SINGLE: Final = 4 if hasattr(select, "epoll") else sys.maxsize


class Poller:
    """Of one event loop, and called on its thread. It opens its set with the first socket that needs it, until `close`.

    A socket is unwatched before it is closed, and closed in a later turn of the loop: so a descriptor that is used
    again is not taken for the one it was.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll: select.epoll | None = None
        # Sockets in the set.
        self._watchers: dict[int, Watcher] = {}
        # Sockets that the loop watches.
        self._single: set[int] = set()
        self._is_closed = False

    def watch(self, descriptor: int, events: int, watcher: Watcher) -> None:
        """Tell `watcher`, or its protocol, when READ, WRITE or one of both comes true; of nothing when `events` is 0.

        Raises OSError when the system has no room for it; who watches it then forgets it.
        """
        if self._is_closed:
            return
        if not events:
            self.forget(descriptor)
        elif descriptor in self._watchers:
            self._change(descriptor, events, watcher)
        elif descriptor in self._single or len(self._single) < _MAX_SINGLE:
            self._watch_single(descriptor, events, watcher)
        else:
            (self._epoll or self._open()).register(descriptor, events)
            self._watchers[descriptor] = watcher

    def forget(self, descriptor: int) -> None:
        """Watch this one no more, whatever has failed before. Does not raise."""
        if descriptor in self._single:
            self._single.discard(descriptor)
            self._loop.remove_reader(descriptor)
            self._loop.remove_writer(descriptor)
        elif self._watchers.pop(descriptor, None) is not None and self._epoll is not None:
            with suppress(OSError):
                self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Watch nothing any more. Safe to repeat."""
        self._is_closed = True
        for descriptor in list(self._single):
            self.forget(descriptor)
        self._watchers.clear()
        epoll, self._epoll = self._epoll, None
        if epoll is not None:
            self._loop.remove_reader(epoll.fileno())
            epoll.close()

    def _open(self) -> select.epoll:
        epoll = select.epoll()
        try:
            self._loop.add_reader(epoll.fileno(), calls.serve, epoll, self._watchers)
        except OSError:
            epoll.close()
            raise
        self._epoll = epoll
        return epoll

    def _change(self, descriptor: int, events: int, watcher: Watcher) -> None:
        epoll = self._epoll
        assert epoll is not None, "there is a set"
        epoll.modify(descriptor, events)
        self._watchers[descriptor] = watcher

    def _watch_single(self, descriptor: int, events: int, watcher: Watcher) -> None:
        self._single.add(descriptor)
        if events & READ:
            self._loop.add_reader(descriptor, calls.serve_one, descriptor, watcher)
        else:
            self._loop.remove_reader(descriptor)
        if events & WRITE:
            self._loop.add_writer(descriptor, watcher[0].ready, WRITE)
        else:
            self._loop.remove_writer(descriptor)
