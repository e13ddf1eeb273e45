"""What drives instances on the event loop: for models that are fast and never block.

A model that forms batches is run in turns of the loop, so that requests of one turn can share a batch; one that
does not is run where its requests are submitted.
"""

from __future__ import annotations

import asyncio
import threading

from modelserver.execution.loop_seat import LoopSeat
from modelserver.execution.runner import BatchRunner
from modelserver.scheduling.direct import DirectScheduler

# How long batches may keep the event loop before others get their turn.
_TURN_BUDGET_NS = 1_000_000


class InlineWorker(LoopSeat):
    """Runs batches in turns of the event loop, each turn within a time budget, so that the loop stays responsive.

    It is its own seat.
    """

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the turn in progress. On the loop's own thread, or when it does not run, there is none."""
        if threading.get_ident() == self._loop_thread_id or not self._loop.is_running():
            return True
        return self._has_ended.wait(timeout_s)

    def _take_turn(self) -> None:
        self._loop_thread_id = threading.get_ident()
        budget_ends_ns = self._now_ns() + _TURN_BUDGET_NS
        while True:
            batch, wait_until_ns = self._source.try_take(self)
            if batch is None:
                break
            self._source.deliver(self.runner.run(batch))
            if self._now_ns() >= budget_ends_ns:
                self._loop.call_soon(self._take_turn)
                return
        if self.is_left:
            self._has_ended.set()
        elif wait_until_ns is not None:
            self._loop.call_later(max(0, wait_until_ns - self._now_ns()) / 1e9, self._take_turn)


class DirectWorker:
    """An instance of a `DirectScheduler`. `start`, `close` and `join` may be called from any thread."""

    def __init__(self, scheduler: DirectScheduler, runner: BatchRunner, loop: asyncio.AbstractEventLoop) -> None:
        self.runner = runner
        self._scheduler = scheduler
        self._loop = loop
        self._run = runner.run_lone  # one bound method, so that it can be found again
        self._has_ended = threading.Event()

    def start(self) -> None:
        self._scheduler.attach(self._run)

    def close(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._leave)
        except RuntimeError:  # the loop is closed, and with it every call of the instance
            self._has_ended.set()

    def join(self, timeout_s: float | None) -> bool:
        """Wait until the loop has left the instance; a loop that does not run is not in it."""
        if not self._loop.is_running():
            return True
        return self._has_ended.wait(timeout_s)

    def _leave(self) -> None:
        self._scheduler.detach(self._run)
        self._has_ended.set()
