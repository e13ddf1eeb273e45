"""Wakes an event loop at exact times. The loop's own timers are rounded to a millisecond, which is ten requests."""

from __future__ import annotations

import abc
import asyncio
import ctypes
import os
import sys
from collections.abc import Callable

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
