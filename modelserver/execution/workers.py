"""Workers drive instances: each takes batches from its source and has its runner run them.

A worker is a place, and its runner a mode:

    place                      runs batches of instances that
    BatchThread                answer at once or later, in a thread of their own
    StepThread                 go in steps, in a thread of their own
    InlineWorker               answer at once or later, in turns of the event loop
    DirectWorker               answer at once, within the call that submits the request
    ProcessWorker              live in a child process, which the event loop talks to (`process_worker.py`)
"""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import Sequence

from modelserver.core.clock import Clock
from modelserver.errors import UnavailableError
from modelserver.execution.host_policy import Cores, on_cores
from modelserver.execution.instances import LoadedInstance
from modelserver.execution.runner import Runner
from modelserver.execution.step_runner import StepRunner
from modelserver.scheduling.direct import DirectScheduler
from modelserver.scheduling.parked_workers import WaitingThread
from modelserver.scheduling.scheduler import BatchSource

# How long the worker of an instance that cannot execute waits before it looks at the queue again.
AWAY_NS = 20_000_000
# How long batches may keep the event loop in one turn.
_TURN_BUDGET_NS = 1_000_000
# How long a stepping instance may accept requests before its next step.
_TAKE_BUDGET_NS = 5_000_000
# How long a thread without batches is kept. One that has had none ends at once, so that models which are loaded and
# not asked hold no thread.
_IDLE_S = 10.0


class Peers:
    """The active instances that serve a model's requests now. `instances` is replaced, never changed."""

    def __init__(self) -> None:
        self.instances: Sequence[LoadedInstance] = ()

    def may_take(self, loaded: LoadedInstance) -> bool:
        """Whether the instance may run the next batch: it can execute, or no other can either. From any thread."""
        if loaded.instance.can_execute():
            return True
        return not any(other.instance.can_execute() for other in self.instances)


class Worker(abc.ABC):
    """Drives one instance. `start`, `close`, `join` and `give_up` may be called from any thread but its own."""

    is_inline = False

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @abc.abstractmethod
    def start(self) -> None:
        """Take batches from now on. Called once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Take no further batch. Returns at once."""

    @abc.abstractmethod
    def join(self, timeout_s: float | None) -> bool:
        """Wait until the batch in progress is done; False if it is not done in time."""

    @property
    def num_sequences(self) -> int:
        """Sequences under way on its instance: once closed, the worker ends when these have ended."""
        return 0

    def give_up(self) -> None:
        """End the sequences and batches of the worker, after `join` has waited long enough."""


class ThreadWorker(Worker):
    """A thread, on `cores` if given, which works until `_take_turn` returns False."""

    def __init__(self, name: str, source: BatchSource, runner: Runner, clock: Clock, *, cores: Cores | None) -> None:
        super().__init__(runner)
        self._source = source
        self._now_ns = clock.now_ns
        self._cores = cores
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    @property
    def num_sequences(self) -> int:
        return self._source.num_sequences

    def join(self, timeout_s: float | None) -> bool:
        thread = self._thread
        assert thread is not None, "joined after it was started"
        thread.join(timeout_s)
        return not thread.is_alive()

    def _work(self) -> None:
        with on_cores(self._cores):
            while self._take_turn():
                pass

    # A method of its own, so that no request is kept alive while the thread waits for the next.
    @abc.abstractmethod
    def _take_turn(self) -> bool:
        """Look for work and do it, or wait for some; False to end the thread."""


class BatchThread(ThreadWorker):
    """A thread that runs batches as they come. It ends when it has been idle, and starts again for the next batch."""

    def __init__(
        self,
        name: str,
        source: BatchSource,
        runner: Runner,
        clock: Clock,
        *,
        loaded: LoadedInstance,
        peers: Peers,
        cores: Cores | None,
    ) -> None:
        super().__init__(name, source, runner, clock, cores=cores)
        self._loaded = loaded
        self._peers = peers
        self._waiting = WaitingThread(self.start)
        self._patience_s = 0.0

    def close(self) -> None:
        self._source.close_worker(self._waiting)

    def give_up(self) -> None:
        self._source.give_up()
        self.runner.executor.interrupt()

    def _work(self) -> None:
        super()._work()
        if self._waiting.is_left:
            self._waiting.leave()

    def _take_turn(self) -> bool:
        source, waiting, runner = self._source, self._waiting, self.runner
        if not self._peers.may_take(self._loaded):
            source.pass_on(waiting)
            if not waiting.is_left:
                waiting.sleep(AWAY_NS)
            return not waiting.is_left
        batch, wait_until_ns = source.try_take(waiting)
        if batch is None:
            if waiting.is_left:
                return False
            if wait_until_ns is None:
                return waiting.rest(self._patience_s)
            waiting.sleep(wait_until_ns - self._now_ns())
            return True
        self._patience_s = _IDLE_S
        further = source.take_more(waiting, num_further) if (num_further := runner.num_further) > 0 else []
        deliveries = runner.run_together([batch, *further]) if further else runner.run(batch)
        if deliveries:
            source.post(source.deliver, deliveries)
        return True


class StepThread(ThreadWorker):
    """A thread that gives its instance requests as they come, and steps while there is work.

    Without work it sleeps, and then only it is parked; with work it looks at the queue between two steps.
    """

    wakes_after_turn = False

    def __init__(
        self, name: str, source: BatchSource, runner: StepRunner, clock: Clock, *, cores: Cores | None
    ) -> None:
        super().__init__(name, source, runner, clock, cores=cores)
        self.is_parked = False
        self.is_woken = False
        self.is_closed = False
        self.is_left = False
        self._steps = runner
        self._signal = threading.Event()
        self._is_given_up = False
        runner.signal = self._signal

    def wake(self) -> None:
        self._signal.set()

    def settle(self) -> None:
        """Nothing: an extra turn is harmless."""

    def close(self) -> None:
        """Take no further request, and end when the current ones have ended. Returns at once."""
        self._source.close_worker(self)

    def give_up(self) -> None:
        """End before the next step; requests that have not ended by then fail."""
        self._is_given_up = True
        self.wake()

    def _take_turn(self) -> bool:
        runner = self._steps
        self._signal.clear()
        if self._is_given_up:
            name = runner.model_name
            runner.fail_all(UnavailableError(f"model '{name}' was unloaded before the request was finished"))
            return False
        runner.abort_cancelled()
        if runner.has_work:
            self._take_more()
            runner.step()
            return True
        if not runner.has_room and not self.is_closed:
            self._source.pass_on(self)
            self._signal.wait(AWAY_NS / 1e9)
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
        """Give the instance waiting requests that no parked worker will take, within the budget."""
        runner = self._steps
        ends_ns = self._now_ns() + _TAKE_BUDGET_NS
        while runner.has_room and (batches := self._source.take_more(self, 1)):
            runner.run(batches[0])
            if self._now_ns() >= ends_ns:
                return


class LoopWorker(Worker):
    """A worker without a thread: it takes batches in turns of the event loop. Turns belong to the loop's thread."""

    wakes_after_turn = False

    def __init__(self, source: BatchSource, runner: Runner, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(runner)
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
        """Nothing: an extra turn is harmless."""

    @property
    def num_sequences(self) -> int:
        return self._source.num_sequences

    def close(self) -> None:
        self._source.close_worker(self)

    def give_up(self) -> None:
        self._source.give_up()

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the batch in progress. On the loop's own thread, or if the loop does not run, there is none."""
        if threading.get_ident() == self._loop_thread_id or not self._loop.is_running():
            return True
        return self._has_ended.wait(timeout_s)

    @abc.abstractmethod
    def _take_turn(self) -> None:
        """Take the available batches. Sets `_loop_thread_id`, and `_has_ended` once the worker is left."""


class InlineWorker(LoopWorker):
    """Runs batches in turns of the event loop, each turn within a time budget, so that the loop stays responsive."""

    is_inline = True

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


class DirectWorker(Worker):
    """Lets a `DirectScheduler` run requests where they are submitted."""

    is_inline = True

    def __init__(self, scheduler: DirectScheduler, runner: Runner, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(runner)
        self._scheduler = scheduler
        self._loop = loop
        self._run = runner.run_lone  # one bound method, so that `detach` finds it
        self._has_ended = threading.Event()

    def start(self) -> None:
        self._scheduler.attach(self._run)

    def close(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._leave)
        except RuntimeError:  # the loop is closed, so no call of the instance is in progress
            self._has_ended.set()

    def join(self, timeout_s: float | None) -> bool:
        """Wait until the loop has left the instance; True at once if the loop does not run."""
        if not self._loop.is_running():
            return True
        return self._has_ended.wait(timeout_s)

    def _leave(self) -> None:
        self._scheduler.detach(self._run)
        self._has_ended.set()
