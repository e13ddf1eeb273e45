"""A seat without a thread: who sits there takes batches in turns of the event loop."""

from __future__ import annotations

import abc
import asyncio
import threading

from modelserver.core.clock import Clock
from modelserver.execution.runner import BatchRunner
from modelserver.scheduling.source import BatchSource


class LoopSeat(abc.ABC):
    """`start`, `wake` and `close` may be called from any thread; turns belong to the event loop's."""

    def __init__(self, source: BatchSource, runner: BatchRunner, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self.runner = runner
        self.is_parked = False
        self.is_woken = False
        self.is_closed = False
        self.is_left = False
        self._source = source
        self._loop = loop
        self._loop_thread_id: int | None = None  # known from the first turn on
        self._now_ns = clock.now_ns
        self._has_ended = threading.Event()

    def start(self) -> None:
        self._source.post(self._take_turn)

    def wake(self) -> None:
        if threading.get_ident() == self._loop_thread_id:
            self._loop.call_soon(self._take_turn)
        else:
            self._source.post(self._take_turn)

    def settle(self) -> None:
        """The signal is a turn; one too many does no harm."""

    def close(self) -> None:
        self._source.close_seat(self)

    @abc.abstractmethod
    def _take_turn(self) -> None:
        """Take what there is; sets `_loop_thread_id`, and `_has_ended` once the seat is left."""
