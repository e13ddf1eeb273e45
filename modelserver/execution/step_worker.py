"""A thread of its own for a `StepInstance`: it takes requests on as they come, and steps while there is work."""

from __future__ import annotations

import threading

from modelserver.core.clock import Clock
from modelserver.errors import UnavailableError
from modelserver.execution.host_policy import Cores, on_cores
from modelserver.execution.step_runner import StepRunner
from modelserver.scheduling.source import BatchSource

# How long requests may be taken on before those at hand get their next step.
_TAKE_BUDGET_NS = 5_000_000
# How long an instance without work that takes none either is left alone.
_AWAY_NS = 20_000_000


class StepWorker:
    """Drives one instance until its seat is closed and its work is done. It is its own seat.

    Without work it sleeps, and then only it is parked; with work it looks at the queue between two steps. `start`,
    `close`, `join`, `give_up` and `wake` may be called from any thread.
    """

    def __init__(
        self, name: str, source: BatchSource, runner: StepRunner, clock: Clock, *, cores: Cores | None = None
    ) -> None:
        """The thread runs on these cores; None: on any."""
        self.runner = runner
        self.is_parked = False
        self.is_woken = False
        self.is_closed = False
        self.is_left = False
        self._source = source
        self._now_ns = clock.now_ns
        self._cores = cores
        self._signal = threading.Event()
        self._is_given_up = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        runner.wake = self._signal.set  # not `self.wake`, for a circle of references would outlive the model

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._signal.set()

    def settle(self) -> None:
        """The signal is a look at everything; one too many does no harm."""

    def close(self) -> None:
        """Take no further request, and end when those at hand have ended. Returns at once."""
        self._source.close_seat(self)

    def give_up(self) -> None:
        """End before the next step; requests that have not ended by then fail."""
        self._is_given_up = True
        self.wake()

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the end; False if it has not come. From any thread but the worker's own."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        with on_cores(self._cores):
            while self._take_turn():
                pass

    def _take_turn(self) -> bool:
        """Look at everything once; False when this was the last time."""
        runner = self.runner
        self._signal.clear()
        if self._is_given_up:
            name = runner.desk.model_name
            runner.fail_all(UnavailableError(f"model '{name}' was unloaded before the request was finished"))
            return False
        runner.abort_cancelled()
        if runner.has_work:
            self._take_more()
            runner.step()
            return True
        if not runner.has_room and not self.is_closed:
            self._source.pass_on(self)
            self._signal.wait(_AWAY_NS / 1e9)
            return True
        batch, wait_until_ns = self._source.try_take(self)
        if batch is not None:
            runner.run(batch)
            self._take_more()
            return True
        if self.is_left:
            return False
        self._signal.wait(None if wait_until_ns is None else max(0, wait_until_ns - self._now_ns()) / 1e9)
        return True

    def _take_more(self) -> None:
        """Give the instance what waits in the queue and is not for others that sleep, within the budget."""
        runner = self.runner
        ends_ns = self._now_ns() + _TAKE_BUDGET_NS
        while runner.has_room and (batches := self._source.take_more(self, 1)):
            runner.run(batches[0])
            if self._now_ns() >= ends_ns:
                return
