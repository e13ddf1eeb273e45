"""An instance in its own child process: supervised, restarted, and called through shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from modelserver.backend import (
    BackendContext,
    BatchInstance,
    InferResponse,
    InternalError,
    Measurement,
    Placement,
    ServerCalls,
    ServerError,
    UnavailableError,
)
from modelserver.core.loop_thread import LoopThread
from modelserver.core.request import CallOrigin, InferRequest, InFlightRequest, is_in_flight
from modelserver.execution.process.channel import PeerGoneError
from modelserver.execution.process.child_connection import ChildConnection, ReadinessProbe, UnfinishedBatches
from modelserver.execution.process.child_process import ChildProcess
from modelserver.execution.process.in_flight_batch import InFlightBatch, InFlightQueue, OnDone, Result
from modelserver.execution.process.messages import (
    Began,
    Finish,
    Measured,
    Readiness,
    SequenceEnded,
)
from modelserver.execution.process.recipe import ProcessOptions, Recipe, num_instances
from modelserver.execution.process.supervisor import Death, State, Supervisor
from modelserver.telemetry.measurement import ProcessRestarts, RestartReason

_logger = logging.getLogger(__name__)

# The pause between the signal that makes a child show its stack and the one that kills it.
_STACK_S = 0.1


class ProcessInstance(BatchInstance):
    """Hosts any instance in a child process and executes its batches there.

    The constructor blocks until the instance is ready, and raises the ServerError that building it raised. A
    supervisor thread owns each child from start to end: it logs the output, notices the end, and starts the next.
    The connection to the child is on `loop`, which must be running in another thread; without `loop` it has its own
    thread. `begin` is for that loop; `execute` blocks, and is for any other thread.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        options: ProcessOptions | None = None,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        server: ServerCalls | None = None,
        origin: CallOrigin | None = None,
        answers_later: bool = False,
    ) -> None:
        self.name = name
        self.answers_later = answers_later
        # Whether the child's instance works in steps: each request then counts as an execution when it ends.
        self.is_stepped = False
        self._measured: Sequence[Measurement] = ()
        self._recipe = recipe
        self._options = options = options or ProcessOptions()
        self.busy_wait_us = options.busy_wait_us
        # For the loop thread only.
        self._thread = LoopThread(f"{name}-loop") if loop is None else None
        self.loop = loop or self._thread_loop()
        self._connection: ChildConnection | None = None
        self._queue = InFlightQueue()
        self._patience: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self._start_failure: ServerError | None = None
        self._hang_s: float | None = None
        self._killed_for = ""  # the reason passed to `kill`
        self.num_batches = 0
        self._readiness = ReadinessProbe()
        self._server = server
        self._origin = origin or CallOrigin(name)
        self._supervisor = Supervisor(
            name,
            restart=options.restart,
            idle_s=options.idle_s,
            environment=options.environment,
            interpreter=options.interpreter,
            output_lines_per_s=options.output_lines_per_s,
        )
        self._supervisor.start(self)
        failure = self._supervisor.wait_for_start(options.is_wanted)
        if failure is not None:
            self._stop_loop()
            raise failure

    @classmethod
    def of_model(
        cls,
        context: BackendContext,
        placement: Placement,
        recipe: Recipe,
        options: ProcessOptions,
        *,
        answers_later: bool = False,
    ) -> ProcessInstance:
        """The instance of a model. If the context has a server, the child may call other models.

        `answers_later` is needed only if the child's instance cannot tell.
        """
        server = context.server
        return cls(
            placement.name,
            recipe,
            options,
            loop=server.loop if server is not None else None,
            server=server,
            origin=CallOrigin(placement.name, context.model_name, num_instances(context)),
            answers_later=answers_later,
        )

    @property
    def pid(self) -> int | None:
        """The process id of the current child."""
        return self._supervisor.pid

    takes_several_batches = True

    def begin(self, requests: Sequence[InFlightRequest], on_done: OnDone) -> None:
        """Queue a batch for the child, which `flush` sends; `on_done` gets its result. Loop thread only.

        The result is an error if the child dies during the batch, is missing for too long, or raises. If batches are
        retried, only a request during which two children die fails.
        """
        self._queue.add(InFlightBatch(requests, on_done))

    def flush(self) -> None:
        """Send what `begin` queued, in one message. Loop thread only."""
        if self._supervisor.state is not State.READY or self._connection is None:
            self.await_child()
            return
        connection = self._connection
        while batches := self._queue.take(time.monotonic_ns()):  # more than once only if one could not be sent
            self.num_batches += len(batches)
            try:
                connection.send_batches(batches)
            except OSError as error:  # there is not enough memory
                failure = InternalError(f"{self.name}: a batch cannot be sent to its process: {error}")
                for batch in batches:
                    batch.finish(failure)

    def on_sequence_end(self, correlation_id: int | str, reason: str) -> None:
        """Tell the child, before its next batch. Loop thread only."""
        self._send(SequenceEnded(correlation_id=correlation_id, reason=reason))

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | ServerError | None]:
        """One batch in the child. Raises UnavailableError while the child is down, InternalError when it dies."""
        (result,) = self.execute_batches([requests])
        if isinstance(result, ServerError):
            raise result
        return result

    def execute_batches(self, batches: Sequence[Sequence[InferRequest]]) -> Sequence[Result]:
        """Batches in the child, one after the other; raises as `execute`. Blocks, so never on the loop thread."""
        results: list[Result | None] = [None] * len(batches)
        missing = len(batches)
        is_done = threading.Event()

        def on_done(index: int, result: Result) -> None:
            nonlocal missing
            results[index] = result
            missing -= 1
            if not missing:
                is_done.set()

        def send() -> None:
            for index, requests in enumerate(batches):
                assert is_in_flight(requests), "the server calls this"
                self.begin(requests, lambda result, _ns, index=index: on_done(index, result))  # type: ignore[misc]
            self.flush()

        if not self.post(send):
            raise UnavailableError(f"{self.name} is closed")
        is_done.wait()
        return [result for result in results if result is not None]

    def is_ready(self) -> bool:
        """Whether the child is up and, if its instance overrides `is_ready`, ready. Waits at most 50 ms."""
        if self._supervisor.state is not State.READY:
            return False
        if not self._readiness.is_asked:
            return True
        if threading.get_ident() == self._loop_thread_id:
            return self._ask_ready()
        answers: list[bool] = []
        is_done = threading.Event()

        def ask() -> None:
            answers.append(self._ask_ready())
            is_done.set()

        return self.post(ask) and is_done.wait() and answers[0]

    def can_execute(self) -> bool:
        """Whether there is a child to send a batch to."""
        return self._supervisor.state is State.READY

    def count_restarts(self, restarts: ProcessRestarts) -> None:
        """Count restarts in `restarts` from now on. From any thread."""
        restarts.expect()
        self._supervisor.restarts = restarts

    def kill(self, why: str) -> None:
        """Kill the child, start no other, and fail all batches. Returns at once. From any thread.

        `why` continues a sentence that begins with the instance's name.
        """
        self.post(self._kill, why)

    def close(self) -> None:
        """Let the child finish; after `close_timeout_s` it shows its stack and is killed."""
        self._supervisor.close(lambda: self.post(self._send, Finish()), self._options.close_timeout_s)
        self._stop_loop()

    def _thread_loop(self) -> asyncio.AbstractEventLoop:
        assert self._thread is not None, "the caller made it"
        return self._thread.loop

    def _stop_loop(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    def post(self, callback: Callable[..., object], *args: object) -> bool:
        """Call back on the loop thread; False when the loop is closed. From any thread."""
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False
        return True

    # ---- on the loop thread

    _loop_thread_id: int | None = None

    def _send(self, message: Any, payload: Any = None) -> None:
        if self._connection is not None:
            self._connection.send(message, payload)

    def attach(self, child: ChildProcess) -> None:
        """Called by the supervisor, as are `detach` and `trim`."""
        self._loop_thread_id = threading.get_ident()
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
        self._supervisor.start_no_other()
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
        self._readiness = ReadinessProbe(is_asked=began.has_readiness)
        if began.has_readiness:
            self._readiness.send(self._connection)
        self.answers_later = self.answers_later or began.answers_later
        self.is_stepped = began.is_stepped
        if not self._supervisor.has_begun():
            self._connection.child.kill()  # closed meanwhile
        elif self._queue:
            self._queue.has_child()
            self.flush()

    def on_readiness(self, message: Readiness) -> None:
        """Called by the connection."""
        self._readiness.record(message)

    def on_measured(self, message: Measured) -> None:
        """Called by the connection."""
        self._measured = [record.measurement() for record in message.measurements]

    def measure(self) -> Sequence[Measurement]:
        """The last measurements of the child; empty while there is none."""
        return self._measured if self.can_execute() else ()

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
            and self._supervisor.state is not State.CLOSED
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
        if self._supervisor.state is State.CLOSED:
            self._refuse_waiting(float("inf"))
            return
        self._queue.note_wait(time.monotonic())
        if self._patience is None:
            self._patience = self.loop.call_later(self._options.restart_patience_s, self._on_impatience)

    def _on_impatience(self) -> None:
        self._patience = None
        if self._supervisor.state is not State.READY:
            self._refuse_waiting(time.monotonic() - self._options.restart_patience_s + 0.01)
            self.await_child()

    def _refuse_waiting(self, since_s: float) -> None:
        """Fail the batches that have waited since `since_s` or longer."""
        failure = self._supervisor.unavailable()
        for batch in self._queue.take_waiting(since_s):
            batch.finish(failure)

    def _ask_ready(self) -> bool:
        connection = self._connection
        # A child that executes a batch keeps its last answer.
        if connection is not None and not connection.num_in_flight:
            self._readiness.ask(connection)
        if connection is not None and self._hang_s is None and self._readiness.waited_s > self._options.ready_timeout_s:
            self._hang_s = self._options.ready_timeout_s
            self._kill_with_stack(connection.child)
        return self._readiness.is_ready

    def trim(self, child: ChildProcess) -> None:
        """Give memory back, on both sides."""
        if self._connection is not None and self._connection.child is child:
            with contextlib.suppress(PeerGoneError):  # the supervisor sees the end
                child.channel.trim()
                if not child.channel.has_leases:
                    self._supervisor.num_trimmed = self.num_batches
