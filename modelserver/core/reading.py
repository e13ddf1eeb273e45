"""How far the reader of a request's responses has come, as its sender sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable

# A sender waits when this many responses are sent and unread.
MAX_UNREAD = 64


class Reading:
    """Counts the unread responses of one request, and remembers that its reader has left.

    Senders' threads call `sent` and `wait_for_room`, the event loop thread `read` and `cancel`. `_lock` guards all
    fields; callbacks are called without it.
    """

    __slots__ = (
        "_is_over",
        "_lock",
        "_max_unread",
        "_num_unread",
        "_on_cancel",
        "_on_room",
        "_room",
        "has_room",
        "is_cancelled",
    )

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        self.is_cancelled = False
        # Whether a sender need not wait. May be read without the lock.
        self.has_room = max_unread > 0
        self._max_unread = max_unread
        self._num_unread = 0
        self._is_over = False
        self._lock = threading.Lock()
        self._room: threading.Event | None = None  # of the senders that wait
        self._on_room: Callable[[], None] | None = None
        self._on_cancel: Callable[[], None] | None = None

    def sent(self) -> None:
        """One more response is on its way."""
        with self._lock:
            self._num_unread += 1
            if self._num_unread >= self._max_unread and not self._is_over:
                self.has_room = False

    def read(self) -> None:
        """The reader is done with a response."""
        with self._lock:
            self._num_unread -= 1
            if self._num_unread != self._max_unread - 1:
                return
            callback = self._on_room
            self._let_go()
        if callback is not None:
            callback()

    def wait_for_room(self) -> None:
        """Wait until there is room, the reader has left, or the request has ended."""
        while True:
            with self._lock:
                if self.has_room:
                    return
                if self._room is None:
                    self._room = threading.Event()
                room = self._room
            room.wait()

    def cancel(self, _request: object = None) -> None:
        """The reader has left: senders stop waiting for it. Safe to repeat; `InFlightRequest.on_cancel`."""
        with self._lock:
            self.is_cancelled = self._is_over = True
            callbacks = (self._on_cancel, self._on_room)
            self._on_cancel = self._on_room = None
            self._let_go()
        for callback in callbacks:
            if callback is not None:
                callback()

    def end(self) -> None:
        """The request has ended: senders stop waiting, and callbacks are no longer called."""
        with self._lock:
            self._is_over = True
            self._on_cancel = self._on_room = None
            self._let_go()

    def watch(self, *, on_cancel: Callable[[], None] | None, on_room: Callable[[], None] | None) -> None:
        """See `ResponseSender.watch`."""
        with self._lock:
            is_cancelled, is_over = self.is_cancelled, self._is_over
            if not is_over:
                self._on_cancel = on_cancel or self._on_cancel
                self._on_room = on_room or self._on_room
        if is_cancelled and on_cancel is not None:
            on_cancel()

    def _let_go(self) -> None:
        """There is room: wake the senders that wait. Called with the lock held."""
        self.has_room = True
        if self._room is not None:
            self._room.set()
            self._room = None
