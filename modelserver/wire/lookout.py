"""Whether the event loop falls asleep between two requests of a client that sends one at a time.

To be woken takes longer than a small request does, and the core that the loop sleeps on must be woken too. So where a
request was answered at once, and nothing else is to do, the loop looks for the next one some more times before it
sleeps: for as long as the answers to the last ones let expect one, and with so much of its time at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from modelserver.execution.busy_wait import BusyWait

# How long the next request may take to come: a client that answers at once needs some 25 µs.
_BUDGET_US: Final = 50
# What may be spent at once of what was not spent before.
_MAX_CREDIT_NS: Final = 1_000_000
_ALWAYS: Final = 100


class Lookout:
    """Of one port, and called on its event loop. `percent` of the time is looked at most; 0: never.

    It looks by asking for another turn of the loop: each polls the sockets, and what has come is done first.
    """

    __slots__ = (
        "_busy_wait",
        "_credit_ns",
        "_is_looking",
        "_is_on",
        "_loop",
        "_now_ns",
        "_num_seen",
        "_percent",
        "_since_ns",
        "num_expected",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        percent: int,
        *,
        busy_wait: BusyWait | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.num_expected = 0
        self._loop = loop
        self._percent = percent
        self._is_on = percent > 0
        self._busy_wait = busy_wait or BusyWait(_BUDGET_US)
        self._now_ns = now_ns
        self._is_looking = False
        self._num_seen = 0
        self._credit_ns = 0
        self._since_ns = now_ns()

    def expect(self) -> None:
        """A request was answered at once, and its client may send the next one soon."""
        self.num_expected += 1
        if self._is_on and not self._is_looking:
            self._begin()

    def _begin(self) -> None:
        now_ns = self._now_ns()
        self._credit_ns = min(_MAX_CREDIT_NS, self._credit_ns + (now_ns - self._since_ns) * self._percent // _ALWAYS)
        self._since_ns = now_ns
        # What one look in vain costs must be there; who may look all the time needs nothing.
        if (self._credit_ns >= _BUDGET_US * 1000 or self._percent == _ALWAYS) and self._busy_wait.begin():
            self._is_looking = True
            self._num_seen = self.num_expected
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Called in each turn of the loop, once it has done what has come."""
        has_come = self.num_expected != self._num_seen
        if not has_come and self._busy_wait.go_on():
            self._loop.call_soon(self._look)
            return
        self._busy_wait.end(has_come=has_come)
        self._is_looking = False
        now_ns = self._now_ns()
        self._credit_ns += (now_ns - self._since_ns) * (self._percent - _ALWAYS) // _ALWAYS
        self._since_ns = now_ns
        if has_come:
            self._begin()
