"""A child that is started again after it died, as the server's event loop handles it: its batches and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from modelserver.backend import InternalError, Measurement, ServerCalls, ServerError
from modelserver.core.request import CallOrigin, InFlightRequest
from modelserver.execution.process.channel import PeerGoneError
from modelserver.execution.process.child_connection import ChildConnection, ReadinessProbe, UnfinishedBatches
from modelserver.execution.process.child_process import ChildProcess
from modelserver.execution.process.in_flight_batch import InFlightBatch, InFlightQueue, OnDone
from modelserver.execution.process.lifecycle import Death, Lifecycle, State
from modelserver.execution.process.messages import Began, Finish, Measured, Readiness, SequenceEnded
from modelserver.execution.process.recipe import ProcessOptions, Recipe
from modelserver.telemetry.measurement import RestartReason

_logger = logging.getLogger(__name__)

# The pause between the signal that makes a child show its stack and the one that kills it.
_STACK_S = 0.1


class SupervisedChild:
    """The batches of one instance, sent to the child that lives now, or kept for the next one.

    Everything but `post`, `death_of` and `kill` is for the loop thread.
    """

    def __init__(
        self,
        life: Lifecycle,
        recipe: Recipe,
        options: ProcessOptions,
        *,
        loop: asyncio.AbstractEventLoop,
        server: ServerCalls | None,
        origin: CallOrigin,
        answers_later: bool,
    ) -> None:
        self.name = life.name
        self.loop = loop
        self.loop_thread_id: int | None = None
        self.answers_later = answers_later
        # Whether the child's instance works in steps: each request then counts as an execution when it ends.
        self.is_stepped = False
        self.measured: Sequence[Measurement] = ()
        self.readiness = ReadinessProbe()
        # The number of batches sent, and what it was when memory was given back. The supervisor's thread reads them.
        self.num_batches = 0
        self.num_trimmed = 0
        self._life = life
        self._recipe = recipe
        self._options = options
        self._server = server
        self._origin = origin
        self._connection: ChildConnection | None = None
        self._queue = InFlightQueue()
        self._patience: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self._start_failure: ServerError | None = None
        self._hang_s: float | None = None
        self._killed_for = ""  # the reason passed to `kill`

    def post(self, callback: Callable[..., object], *args: object) -> bool:
        """Call back on the loop thread; False when the loop is closed. From any thread."""
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False
        return True

    def kill(self, why: str) -> None:
        """Kill the child, start no other, and fail all batches. Returns at once. From any thread.

        `why` continues a sentence that begins with the instance's name.
        """
        self.post(self._kill, why)

    def begin(self, requests: Sequence[InFlightRequest], on_done: OnDone) -> None:
        """Queue a batch for the child, which `flush` sends; `on_done` gets its result. Loop thread only.

        The result is an error if the child dies during the batch, is missing for too long, or raises. If batches are
        retried, only a request during which two children die fails.
        """
        self._queue.add(InFlightBatch(requests, on_done))

    def flush(self) -> None:
        """Send what `begin` queued, in one message. Loop thread only."""
        if self._life.state is not State.READY or self._connection is None:
            self.await_child()
            return
        connection = self._connection
        while batches := self._queue.take(time.monotonic_ns()):  # more than once only if one could not be sent
            self.num_batches += len(batches)
            connection.send_batches(batches)

    def end_sequence(self, correlation_id: int | str, reason: str) -> None:
        """Tell the child, before its next batch. Loop thread only."""
        self._send(SequenceEnded(correlation_id=correlation_id, reason=reason))

    def finish(self) -> None:
        """Have the child end after its batches."""
        self._send(Finish())

    def _send(self, message: Any, payload: Any = None) -> None:
        if self._connection is not None:
            self._connection.send(message, payload)

    def attach(self, child: ChildProcess) -> None:
        """A child was started: tell it what to build. The supervisor calls this, `detach`, `trim` and `await_child`."""
        self.loop_thread_id = threading.get_ident()
        self._start_failure = None
        self._hang_s = None
        self._connection = ChildConnection(child, self.loop, self, self._server, self._origin)
        self._connection.send(self._recipe.message(is_call=False, busy_wait_us=self._options.busy_wait_us))
        self._start_timer = self.loop.call_later(self._options.start_timeout_s, self._on_slow_start, child)

    def _on_slow_start(self, child: ChildProcess) -> None:
        self._start_failure = InternalError(
            f"{self.name} did not start within {self._options.start_timeout_s} s; its stack is in the log"
        )
        self._kill_with_stack(child)

    def _kill(self, why: str) -> None:
        self._killed_for = self._killed_for or why
        self._life.start_no_other()
        if self._connection is not None:
            _logger.warning("%s %s: its process is killed", self.name, why)
            self._kill_with_stack(self._connection.child)

    def _kill_with_stack(self, child: ChildProcess) -> None:
        child.dump_stack()
        # Leaves time for the stack to reach the log and the error.
        self.loop.call_later(_STACK_S, child.kill)

    def on_began(self, began: Began) -> None:
        """Called by the connection."""
        assert self._connection is not None, "it calls this"
        if self._start_timer is not None:
            self._start_timer.cancel()
        if began.error is not None:
            self._start_failure = began.error.error()
            self._connection.child.kill()
            return
        self.readiness = ReadinessProbe(is_asked=began.has_readiness)
        if began.has_readiness and not self._life.has_stood:  # a later child gets the waiting batches first
            self.readiness.send(self._connection)
        self.answers_later = self.answers_later or began.answers_later
        self.is_stepped = began.is_stepped
        if not self._life.has_begun():
            self._connection.child.kill()  # closed meanwhile
        elif self._queue:
            self._queue.has_child()
            self.flush()

    def on_readiness(self, message: Readiness) -> None:
        """Called by the connection."""
        self.readiness.record(message)

    def on_measured(self, message: Measured) -> None:
        """Called by the connection."""
        self.measured = [record.measurement() for record in message.measurements]

    def on_progress(self) -> None:
        """Called by the connection: the next batch is being executed."""
        if self._queue:
            self.flush()  # batches that waited while a suspect was executed alone
        timeout_s = self._options.execute_timeout_s
        if timeout_s is None:
            return
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if self._connection is not None and self._connection.num_in_flight:
            self._watchdog = self.loop.call_later(timeout_s, self._on_hang, self._connection.child)

    def _on_hang(self, child: ChildProcess) -> None:
        self._hang_s = self._options.execute_timeout_s
        self._kill_with_stack(child)

    def detach(self, child: ChildProcess, is_done: threading.Event) -> None:
        """The child has ended: fail its batches, or queue them for the next child."""
        try:
            connection, self._connection = self._connection, None
            for timer in (self._watchdog, self._start_timer):
                if timer is not None:
                    timer.cancel()
            if connection is not None:
                failure = self._death_in_flight(child)
                self._handle_unfinished(connection.end(child.num_begun, failure), failure)
                connection.calls.end()
        finally:
            is_done.set()
        self.await_child()

    def _handle_unfinished(self, unfinished: UnfinishedBatches, failure: ServerError) -> None:
        """Fail the batches of a dead child, or have them executed once more. The next child gets unbegun ones."""
        is_retried = (
            self._options.retries_batches
            and not self.answers_later
            and self._hang_s is None
            and self._life.state is not State.CLOSED
        )
        again: list[InFlightBatch] = []
        for batch in unfinished.executed:
            if is_retried and not batch.is_lost:
                batch.is_lost = True
                again.append(batch)
            else:
                batch.finish(failure)
        self._queue.put_back([*again, *unfinished.unseen])
        executing = unfinished.executing
        if executing is None:
            return
        if is_retried and len(executing.numbers) > 1:
            _logger.error(
                "%s died while it executed a batch: its %d requests are executed once more, one by one",
                self.name,
                len(executing.numbers),
            )
            self._queue.isolate(executing)
        elif executing.is_suspect:
            executing.finish(InternalError(f"{failure.message}\nThe request was executed alone, after a batch with it"))
        else:
            executing.finish(failure)

    def death_of(self, child: ChildProcess) -> Death:
        """Why it failed to start, or how it ended."""
        assert child.exit_report is not None, "it has ended"
        reason = RestartReason.KILLED if child.exit_report.status < 0 else RestartReason.EXITED
        if self._hang_s is not None:
            reason = RestartReason.HUNG
        return Death(self._start_failure or self._death_in_flight(child), reason)

    def _death_in_flight(self, child: ChildProcess) -> ServerError:
        failure = f"the process of {self.name} {child.exit_report}"
        if self._hang_s is not None:
            failure = f"{self.name} did not answer within {self._hang_s} s and was killed: {failure}"
        elif self._killed_for:
            failure = f"{self.name} {self._killed_for} and was killed: {failure}"
        return InternalError(failure)

    def await_child(self) -> None:
        """Limit the time that batches wait for the next child."""
        if not self._queue:
            return
        if self._life.state is State.CLOSED:
            self._refuse_waiting(float("inf"))
            return
        self._queue.note_wait(time.monotonic())
        if self._patience is None:
            self._patience = self.loop.call_later(self._options.restart_patience_s, self._on_impatience)

    def _on_impatience(self) -> None:
        self._patience = None
        if self._life.state is not State.READY:
            self._refuse_waiting(time.monotonic() - self._options.restart_patience_s + 0.01)
            self.await_child()

    def _refuse_waiting(self, since_s: float) -> None:
        """Fail the batches that have waited since `since_s` or longer."""
        failure = self._life.unavailable()
        for batch in self._queue.take_waiting(since_s):
            batch.finish(failure)

    def ask_ready(self) -> bool:
        """Ask the child whether it is ready, and wait a moment for its answer."""
        connection = self._connection
        # A child that executes a batch keeps its last answer.
        if connection is not None and not connection.num_in_flight:
            self.readiness.ask(connection)
        if connection is not None and self._hang_s is None and self.readiness.waited_s > self._options.ready_timeout_s:
            self._hang_s = self._options.ready_timeout_s
            self._kill_with_stack(connection.child)
        return self.readiness.is_ready

    def trim(self, child: ChildProcess) -> None:
        """Give memory back, on both sides."""
        if self._connection is not None and self._connection.child is child:
            if child.channel.trim_arena():
                self.loop.call_soon(self.trim, child)  # the rest in further turns
                return
            with contextlib.suppress(PeerGoneError):  # the supervisor sees the end
                child.channel.trim()
                if not child.channel.has_leases:
                    self.num_trimmed = self.num_batches
