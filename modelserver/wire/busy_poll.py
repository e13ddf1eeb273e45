"""Decides whether the event loop sleeps between two requests of a client that sends one at a time.

Waking up takes longer than a small request does, and the core that the loop sleeps on must wake up too. So when a
request was answered at once, and there is nothing else to do, the loop polls for the next one some more times before it
sleeps: for as long as recent requests suggest, and for at most a share of its time. A request that arrives within the
time that sleeping and waking would have taken costs nothing of that share.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from modelserver.execution.process.channel import BusyWait

# How long to wait for the next request: a client that sends it at once needs some 25 µs.
_BUDGET_US: Final = 50
# The CPU time of a lone client's request where the loop slept before it came: most of it is falling asleep and being
# woken (awake, a request takes some 12 µs). So staying awake for that long between requests is no loss. The 34 µs of
# HTTP/1.1 are not counted in full: a loop that never sleeps leaves its core to no other thread.
GRPC_WOKEN_NS: Final = 40_000
HTTP1_WOKEN_NS: Final = 15_000
# A request that is answered sooner than this came in the same turn: enough clients keep the loop awake. This many more
# requests pass before it polls again.
_BUSY_NS: Final = 4_000
_NUM_TO_PASS: Final = 100
# This many requests pass when the share is used up: asking each time costs a lone request 2 µs.
_NUM_TO_PASS_WITHOUT_CREDIT: Final = 64
# How much of the unused share may be spent at once.
_MAX_CREDIT_NS: Final = 1_000_000
_ALWAYS: Final = 100


# Reads from a client for the next moment.
ReceiveSoon = Callable[[], None]


class BusyPoll:
    """One per port, called on its event loop. Polling takes at most `percent` of the time; 0 turns it off.

    It polls by asking for another turn of the loop: each turn polls the sockets and handles their input first.
    """

    __slots__ = (
        "_busy_wait",
        "_credit_ns",
        "_is_looking",
        "_is_on",
        "_last",
        "_lone",
        "_loop",
        "_now_ns",
        "_num_seen",
        "_num_to_pass",
        "_percent",
        "_since_ns",
        "_woken_ns",
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
        self._num_to_pass = 0
        self._credit_ns = 0
        self._since_ns = now_ns()
        self._woken_ns = 0
        # How to receive from the client that was answered last, and the same if it was also the one before.
        self._last: ReceiveSoon | None = None
        self._lone: ReceiveSoon | None = None

    def expect(self, woken_ns: int, receive_soon: ReceiveSoon | None = None) -> None:
        """A request was answered at once, and its client may send the next one soon.

        `woken_ns` is the CPU time of the next request if it has to wake the loop: staying awake that long is no loss.
        `receive_soon` is always the same object for a connection, if it has one.
        """
        self.num_expected += 1
        if not self._is_on:
            return
        self._woken_ns = woken_ns
        self._lone = receive_soon if receive_soon is self._last else None
        self._last = receive_soon
        if not self._is_looking:
            if self._num_to_pass:
                self._num_to_pass -= 1
            else:
                self._begin()

    def _begin(self) -> None:
        now_ns = self._now_ns()
        self._credit_ns = min(_MAX_CREDIT_NS, self._credit_ns + (now_ns - self._since_ns) * self._percent // _ALWAYS)
        self._since_ns = now_ns
        # The cost of one unsuccessful poll must be available, unless polling is unlimited.
        if self._credit_ns < _BUDGET_US * 1000 and self._percent != _ALWAYS:
            self._num_to_pass = _NUM_TO_PASS_WITHOUT_CREDIT
        elif self._busy_wait.begin():
            self._is_looking = True
            self._num_seen = self.num_expected
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Called in each turn of the loop, after it has handled its input."""
        if self._lone is not None and self.num_expected == self._num_seen:
            self._lone()  # a turn of the loop takes longer to find it
        has_come = self.num_expected != self._num_seen
        if not has_come and self._busy_wait.go_on():
            self._loop.call_soon(self._look)
            return
        self._busy_wait.end(has_come=has_come)
        self._is_looking = False
        if not has_come:
            self._last = self._lone = None  # it may have left, and must not be kept in memory
        now_ns = self._now_ns()
        spent_ns = now_ns - self._since_ns
        saved_ns = min(spent_ns, self._woken_ns) if has_come else 0
        self._credit_ns += spent_ns * self._percent // _ALWAYS - (spent_ns - saved_ns)
        self._since_ns = now_ns
        if has_come:
            self._go_on(spent_ns)

    def _go_on(self, looked_ns: int) -> None:
        """The awaited request has arrived, after that long."""
        if looked_ns < _BUSY_NS:
            self._num_to_pass = _NUM_TO_PASS
        else:
            self._begin()
