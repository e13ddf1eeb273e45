"""The stages of a server's stop: each gets a time limit, and a late one is left behind."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

# Extra time for a stage after the deadline, to release its resources.
STAGE_GRACE_S = 5.0
# The time for stopping after a failed start: no requests have been accepted yet.
FAILED_START_STOP_S = 1.0


class StopStages:
    """The deadline that all stages share, and whether it was kept. Event loop thread only."""

    def __init__(self) -> None:
        # Set when a stage overran or was forced: threads or requests may be left.
        self.is_abandoned = False
        self._deadline_s: float | None = None

    def begin(self, timeout_s: float) -> None:
        """Begin stopping, which may take that long."""
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s

    def add(self, stack: AsyncExitStack, name: str, stop: Callable[[float], Awaitable[object]]) -> None:
        """Make `stop` a stage of stopping: it gets the seconds left and is cancelled a little after them."""

        async def stage() -> None:
            left_s = self._time_left_s()
            try:
                async with asyncio.timeout(left_s + STAGE_GRACE_S):
                    await stop(left_s)
            except asyncio.CancelledError:
                # Forced: the remaining stages close their resources without waiting.
                self._deadline_s = asyncio.get_running_loop().time()
                raise
            except TimeoutError:
                self.is_abandoned = True
                logger.error("stopping: %s took more than the remaining %.1f s; continuing", name, left_s)

        stack.push_async_callback(stage)

    def _time_left_s(self) -> float:
        if self._deadline_s is None:
            return FAILED_START_STOP_S
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())


# The meaning of SIGTERM, SIGINT and SIGHUP: the first asks to stop, the second insists.
# SIGHUP comes when a terminal closes, or from operators who want files read again, which happens here by itself.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# One request to stop often comes twice at once: to the process group, and passed on by the parent (make, tini).
SAME_REQUEST_S = 0.25


class StopSignals:
    """Turns signals into two events while it is entered, except SIGHUP under nohup. Main thread only."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._asked_at_s = 0.0
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._signals = tuple(number for number in SIGNALS if not (is_nohup and number is signal.SIGHUP))
        self.stop = asyncio.Event()
        self.force = asyncio.Event()

    def __enter__(self) -> StopSignals:
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._receive, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.remove_signal_handler(number)

    def _receive(self, number: signal.Signals) -> None:
        now_s = self._now_s()
        if not self.stop.is_set():
            self._asked_at_s = now_s
            logger.info("%s received: finishing what is in flight; a second signal forces", number.name)
            self.stop.set()
        elif now_s - self._asked_at_s > SAME_REQUEST_S:
            logger.warning("%s received again: stopping at once", number.name)
            self.force.set()


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to its end, or until `event` is set: then it is cancelled and has cleaned up on return.

    True if it ended by itself; its exceptions pass through.
    """
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            return False
        task.result()
        return True
    finally:
        waiter.cancel()
