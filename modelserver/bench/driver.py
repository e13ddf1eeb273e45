"""Drives lanes: keeps a number of requests in flight, or sends them when they are due, and records the answers."""

from __future__ import annotations

import abc
import asyncio
import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic_ns

from modelserver.bench.feed import Feed
from modelserver.bench.recorder import Recorder
from modelserver.bench.work import PeriodicLoad
from modelserver.client.lane import Lane
from modelserver.errors import ServerError

# Wakes an event loop at exact times. The loop's own timers are rounded to a millisecond, which is ten requests.

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_ABSOLUTE = 1
_NS_PER_S = 1_000_000_000


class Pacer(abc.ABC):
    @abc.abstractmethod
    def arm(self, due_ns: int) -> None:
        """Call back once when the monotonic clock reaches `due_ns`; replaces an earlier time."""

    @abc.abstractmethod
    def close(self) -> None:
        """Call back no more."""


class _Spec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerPacer(Pacer):
    """Linux: a timerfd, some 50 us late at most on an idle machine. Raises OSError where there is none."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        except AttributeError:
            raise OSError("this system has no timerfd") from None
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._spec = _Spec()
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._fire)

    def arm(self, due_ns: int) -> None:
        self._spec.value_s, self._spec.value_ns = divmod(max(due_ns, 1), _NS_PER_S)
        self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(self._spec), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            # Armed again after it had fired.
            return
        self._callback()


class LoopPacer(Pacer):
    """Anywhere: the timers of the loop."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, due_ns: int) -> None:
        self.close()
        self._timer = self._loop.call_at(due_ns / _NS_PER_S, self._callback)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def make_pacer(callback: Callable[[], None]) -> Pacer:
    """The best pacer of this system."""
    if sys.platform == "linux":
        try:
            return TimerPacer(callback)
        except OSError:
            pass
    return LoopPacer(callback)


# Due requests that are sent in one go before the loop looks at its sockets again.
MAX_BURST = 64
# Connections opened at the same time for waiting requests. After a pause of the machine hundreds of requests wait;
# hundreds of new connections would be the next pause.
MAX_GROWING = 2


class Driver:
    """The common part of all loads: sending and ending."""

    def __init__(self, feed: Feed, recorder: Recorder) -> None:
        self._feed = feed
        self._recorder = recorder
        self._is_running = True
        self._num_inflight = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def stop(self, timeout_s: float) -> int:
        """Stop sending and wait for the answers; returns how many are missing."""
        self._is_running = False
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
        except TimeoutError:
            return self._num_inflight
        return 0

    async def wait(self) -> None:
        """Until nothing is in flight: after `stop`, or when a load with an end is at its end."""
        await self._is_idle.wait()

    def responded(self, lane: Lane) -> None:
        """Only a periodic load acts on single responses."""

    def _send(self, lane: Lane) -> None:
        self._num_inflight += 1
        self._is_idle.clear()
        lane.send(self._feed.next(lane))


class ClosedDriver(Driver):
    """Every lane sends again as soon as its answer arrives."""

    def __init__(self, feed: Feed, recorder: Recorder, *, num_requests: int | None) -> None:
        super().__init__(feed, recorder)
        self._num_left = num_requests

    def begin(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            self._recorder.prepare(lane)
            if self._may_send():
                self._send(lane)

    def _may_send(self) -> bool:
        if self._num_left is None:
            return self._is_running
        self._num_left -= 1
        return self._num_left >= 0 and self._is_running

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        self._recorder.record(lane, now_ns, failure)
        if self._num_left is None and self._is_running:
            lane.send(self._feed.next(lane))
            return
        if self._may_send():
            lane.send(self._feed.next(lane))
            return
        self._num_inflight -= 1
        if not self._num_inflight:
            self._is_idle.set()


class PeriodicDriver(Driver):
    """One request per lane; more lanes begin when the last ones have had enough responses."""

    def __init__(self, feed: Feed, recorder: Recorder, load: PeriodicLoad) -> None:
        super().__init__(feed, recorder)
        self._load = load
        self._lanes: list[Lane] = []
        self._num_begun = 0
        self._latest: list[Lane] = []
        self._done: set[int] = set()

    def begin(self, lanes: list[Lane]) -> None:
        """`lanes` are as many as there are requests in all."""
        self._lanes = lanes
        for lane in lanes:
            self._recorder.prepare(lane)
        self._launch(self._load.first)

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        self._recorder.record(lane, now_ns, failure)
        self._done.add(lane.index)
        self._num_inflight -= 1
        self.responded(lane)
        if not self._num_inflight:
            self._is_idle.set()

    def responded(self, lane: Lane) -> None:
        """The latest requests may have had enough responses now."""
        del lane
        if self._is_running and all(self._has_had_enough(lane) for lane in self._latest):
            self._launch(self._load.step)

    def _has_had_enough(self, lane: Lane) -> bool:
        return lane.index in self._done or len(lane.response_times) >= self._load.period

    def _launch(self, count: int) -> None:
        self._latest = self._lanes[self._num_begun : self._num_begun + count]
        self._num_begun += len(self._latest)
        for lane in self._latest:
            self._send(lane)


class OpenDriver(Driver):
    """Sends when a request is due, on a free lane; without one the request waits, and that counts as its latency."""

    def __init__(
        self,
        feed: Feed,
        recorder: Recorder,
        *,
        due_times: Iterator[int],
        num_requests: int | None,
        grow: Callable[[], asyncio.Task[Lane]] | None,
    ) -> None:
        """`grow` makes another lane, as long as there may be more."""
        super().__init__(feed, recorder)
        self._due_times = due_times
        self._num_left = num_requests
        self._grow = grow
        self._growing: set[asyncio.Task[Lane]] = set()
        self._free: list[Lane] = []
        self._backlog: deque[int] = deque()
        self._next_ns = next(due_times)
        self._pacer = make_pacer(self._tick)

    def begin(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            self._recorder.prepare(lane)
        self._free = list(reversed(lanes))
        self._is_idle.clear()
        self._pacer.arm(self._next_ns)

    async def stop(self, timeout_s: float) -> int:
        self._is_running = False
        self._backlog.clear()
        self._settle()
        num_left = await super().stop(timeout_s)
        for task in self._growing:
            task.cancel()
        self._pacer.close()
        return num_left

    def _tick(self) -> None:
        num_sent = 0
        while self._is_running and self._next_ns <= monotonic_ns() and num_sent < MAX_BURST:
            if self._num_left is not None:
                self._num_left -= 1
                self._is_running = self._num_left > 0
            self._dispatch(self._next_ns)
            self._next_ns = next(self._due_times)
            num_sent += 1
        if self._is_running:
            self._pacer.arm(self._next_ns)
        self._settle()

    def _dispatch(self, due_ns: int) -> None:
        if not self._free:
            self._backlog.append(due_ns)
            self._add_lane()
            return
        lane = self._free.pop()
        lane.due_ns = due_ns
        self._send(lane)

    def _add_lane(self) -> None:
        if self._grow is None or len(self._growing) >= min(MAX_GROWING, len(self._backlog)):
            return
        try:
            task = self._grow()
        except ServerError:
            self._grow = None
            return
        self._growing.add(task)
        task.add_done_callback(self._grown)

    def _grown(self, task: asyncio.Task[Lane]) -> None:
        self._growing.discard(task)
        if task.cancelled():
            return
        if isinstance(task.exception(), ServerError):
            # No more lanes are possible: requests wait for the existing ones and are late.
            self._grow = None
            return
        lane = task.result()
        self._recorder.prepare(lane)
        self._use(lane)

    def answered(self, lane: Lane, now_ns: int, failure: str | None) -> None:
        self._recorder.record(lane, now_ns, failure)
        self._num_inflight -= 1
        self._use(lane)
        if not self._is_running:
            self._settle()

    def _use(self, lane: Lane) -> None:
        if self._backlog:
            lane.due_ns = self._backlog.popleft()
            self._send(lane)
        else:
            self._free.append(lane)

    def _settle(self) -> None:
        if not self._is_running and not self._num_inflight and not self._backlog:
            self._is_idle.set()
