"""An instance in a child process of its own: supervised, restarted, and as quick to call as shared memory allows."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelserver.backend import (
    BatchInstance,
    InferRequest,
    InferResponse,
    InternalError,
    ServerCalls,
    ServerError,
    UnavailableError,
)
from modelserver.execution.channel import PeerGoneError
from modelserver.execution.child_process import ChildProcess
from modelserver.execution.conversation import Conversation
from modelserver.execution.flight import Flight, OnDone, Result
from modelserver.execution.loop_thread import LoopThread
from modelserver.execution.messages import Ask, Began, Begin, Call, CallRead, Finish, Readiness, SequenceEnded
from modelserver.execution.model_calls import CallOrigin, ModelCalls
from modelserver.execution.readiness import ReadinessProbe
from modelserver.execution.restart import RestartOptions, RestartPolicy
from modelserver.execution.shared_buffer import ByteView

_logger = logging.getLogger(__name__)

# From the signal that lets a child show its stack to the one that kills it.
_STACK_S = 0.1


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a child builds its instance: it calls `target` ("module:function") with `arguments`.

    The function returns a BatchInstance. Arguments are what msgpack can carry; `python_path` is put in front
    of the child's sys.path.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()

    def message(self, *, is_call: bool, busy_wait_us: int = 0) -> Begin:
        return Begin(
            target=self.target,
            arguments=dict(self.arguments),
            python_path=list(self.python_path),
            is_call=is_call,
            busy_wait_us=busy_wait_us,
        )


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Limits and environment of a child process; `execute_timeout_s` None trusts the instance to come back.

    `interpreter` is the Python that runs it, the server's own if empty.
    """

    start_timeout_s: float = 300.0
    execute_timeout_s: float | None = None
    close_timeout_s: float = 10.0
    # How long a batch waits for a child that is being restarted before it fails UNAVAILABLE.
    restart_patience_s: float = 5.0
    # After this long without traffic, shared memory beyond a few megabytes goes back to the system.
    idle_s: float = 15.0
    # How long either side looks for a message, where one is likely, before it sleeps; 0: not at all.
    busy_wait_us: int = 100
    restart: RestartOptions = field(default_factory=RestartOptions)
    environment: Mapping[str, str] = field(default_factory=dict)
    interpreter: str = ""


class _State(enum.Enum):
    STARTING = "is starting"
    READY = "is ready"
    WAITING = "crashed and waits to be restarted"
    CLOSED = "is closed"


class ProcessInstance(BatchInstance):
    """Hosts any instance in a child process and executes its batches there.

    The constructor blocks until the instance stands; it raises the ServerError that building it raised. A
    supervisor thread owns each child from start to end: it logs the output, notices the end, and starts the next.
    The conversation with the child is on `loop`, which must be running in another thread; without one there is a
    thread for it. `begin` is for that loop; `execute` blocks, and is for any other thread.
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
        self.busy_wait_us = (options or ProcessOptions()).busy_wait_us
        self._recipe = recipe
        self._options = options or ProcessOptions()
        self._policy = RestartPolicy(self._options.restart)
        # Guards the fields below; notified when they change.
        self._changed = threading.Condition()
        self._state = _State.STARTING
        self._has_stood = False
        self._child: ChildProcess | None = None
        self._failure: ServerError | None = None  # why the last start failed or the last child died
        self._restart_at_s = 0.0
        # The loop thread's own.
        self._thread = LoopThread(f"{name}-loop") if loop is None else None
        self.loop = loop or self._thread_loop()
        self._conversation: Conversation | None = None
        self._waiting: list[Flight] = []
        self._patience: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self._start_failure: ServerError | None = None
        self._hang_s: float | None = None
        self._num_batches = 0
        self._num_trimmed = 0  # what it was when memory was given back
        self._readiness = ReadinessProbe()
        self._calls = ModelCalls(self._send, server, origin or CallOrigin(name), self._request)
        self._supervisor = threading.Thread(target=self._supervise, name=f"supervise-{name}", daemon=True)
        self._supervisor.start()
        self._wait_for_start()

    @property
    def pid(self) -> int | None:
        """The process id of the child that lives now."""
        with self._changed:
            return self._child.pid if self._child is not None else None

    takes_several_batches = True

    def begin(self, requests: Sequence[InferRequest], on_done: OnDone) -> None:
        """Queue a batch for the child, which `flush` sends; `on_done` gets its result. Loop thread only.

        The result is an error when the child dies while it executes the batch, is not there for too long, or raises.
        """
        self._waiting.append(Flight(requests, on_done))

    def flush(self) -> None:
        """Send what `begin` queued, in one message. Loop thread only."""
        if self._state is not _State.READY or self._conversation is None:
            self._await_child()
            return
        flights, self._waiting = self._waiting, []
        self._num_batches += len(flights)
        try:
            self._conversation.send_flights(flights)
        except OSError as error:  # no memory to be had
            failure = InternalError(f"{self.name}: a batch cannot be sent to its process: {error}")
            for flight in flights:
                flight.finish(failure)

    def on_sequence_end(self, correlation_id: int | str, reason: str) -> None:
        """Tell the child, before what it executes next. Loop thread only."""
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
                self.begin(requests, lambda result, _ns, index=index: on_done(index, result))  # type: ignore[misc]
            self.flush()

        if not self._post(send):
            raise UnavailableError(f"{self.name} is closed")
        is_done.wait()
        return [result for result in results if result is not None]

    def is_ready(self) -> bool:
        """Whether the child is up and, where its instance has an opinion, ready. Waits 50 ms at most."""
        if self._state is not _State.READY:
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

        return self._post(ask) and is_done.wait() and answers[0]

    def can_execute(self) -> bool:
        """Whether there is a child to send a batch to."""
        return self._state is _State.READY

    def close(self) -> None:
        """Let the child finish in order; after `close_timeout_s` it shows where it hangs and is killed."""
        with self._changed:
            was_ready = self._state is _State.READY
            self._state = _State.CLOSED
            child = self._child
            self._changed.notify_all()
        if child is not None:
            if was_ready:
                self._post(self._send, Finish())
                self._supervisor.join(self._options.close_timeout_s)
                if self._supervisor.is_alive():
                    _logger.warning("%s: still busy after %.1f s, killing it", self.name, self._options.close_timeout_s)
                    child.dump_stack()
                    self._supervisor.join(0.2)
            child.kill()
        self._supervisor.join()
        self._stop_loop()

    def _thread_loop(self) -> asyncio.AbstractEventLoop:
        assert self._thread is not None, "the caller made it"
        return self._thread.loop

    def _stop_loop(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    def _wait_for_start(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._state is not _State.STARTING)
            if self._state is not _State.CLOSED or self._failure is None:
                return
            failure = self._failure
        self._supervisor.join()
        self._stop_loop()
        raise failure

    def _post(self, callback: Callable[..., object], *args: object) -> bool:
        """Call back on the loop thread; False when the loop is closed. From any thread."""
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False
        return True

    # ---- on the loop thread

    _loop_thread_id: int | None = None

    def _send(self, message: Any, payload: Any = None) -> None:
        if self._conversation is not None:
            self._conversation.send(message, payload)

    def _request(self, number: int) -> InferRequest | None:
        return self._conversation.request(number) if self._conversation is not None else None

    def _attach(self, child: ChildProcess) -> None:
        self._loop_thread_id = threading.get_ident()
        self._start_failure = None
        self._hang_s = None
        self._conversation = Conversation(child, self.loop, self)
        self._conversation.send(self._recipe.message(is_call=False, busy_wait_us=self._options.busy_wait_us))
        self._start_timer = self.loop.call_later(self._options.start_timeout_s, self._on_slow_start, child)

    def _on_slow_start(self, child: ChildProcess) -> None:
        self._start_failure = InternalError(
            f"{self.name} did not start within {self._options.start_timeout_s} s; its stack is in the log"
        )
        self._kill_with_stack(child)

    def _kill_with_stack(self, child: ChildProcess) -> None:
        child.dump_stack()
        # The stack shall reach the log and the error before the kill.
        self.loop.call_later(_STACK_S, child.kill)

    def on_began(self, began: Began) -> None:
        """Called by the conversation."""
        assert self._conversation is not None, "whose word this is"
        if self._start_timer is not None:
            self._start_timer.cancel()
        if began.error is not None:
            self._start_failure = began.error.error()
            self._conversation.child.kill()
            return
        self._readiness = ReadinessProbe(is_asked=began.has_readiness)
        with self._changed:
            if self._state is not _State.STARTING:
                self._conversation.child.kill()  # closed meanwhile
                return
            self._state = _State.READY
            self._has_stood = True
            self._changed.notify_all()
        if self._waiting:
            self.flush()

    def on_readiness(self, message: Readiness) -> None:
        """Called by the conversation."""
        self._readiness.record(message)

    def on_progress(self) -> None:
        """Called by the conversation: from here on the next batch is executed."""
        timeout_s = self._options.execute_timeout_s
        if timeout_s is None:
            return
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
        if self._conversation is not None and self._conversation.num_flights:
            self._watchdog = self.loop.call_later(timeout_s, self._on_hang, self._conversation.child)

    def on_call(self, message: Call, payload: bytearray | ByteView) -> None:
        """Called by the conversation."""
        self._calls.begin(message, payload)

    def on_cancel_call(self, number: int) -> None:
        """Called by the conversation."""
        self._calls.cancel(number)

    def on_call_read(self, message: CallRead) -> None:
        """Called by the conversation."""
        self._calls.read(message.number, message.count)

    def on_caller_left(self, number: int) -> None:
        """Called by the conversation."""
        self._calls.cancel_for(number)

    def on_ask(self, message: Ask) -> None:
        """Called by the conversation."""
        self._calls.answer(message)

    def _on_hang(self, child: ChildProcess) -> None:
        self._hang_s = self._options.execute_timeout_s
        self._kill_with_stack(child)

    def _detach(self, child: ChildProcess, is_done: threading.Event) -> None:
        """The child has ended: everyone who waits for it is told, or goes to the next child."""
        try:
            conversation, self._conversation = self._conversation, None
            for timer in (self._watchdog, self._start_timer):
                if timer is not None:
                    timer.cancel()
            if conversation is not None:
                unseen = conversation.end(child.num_begun, self._death_of(child))
                self._waiting[:0] = unseen
            self._calls.end()
        finally:
            is_done.set()
        self._await_child()

    def _death_of(self, child: ChildProcess) -> ServerError:
        failure = f"the process of {self.name} {child.exit_report}"
        if self._hang_s is not None:
            failure = f"{self.name} did not answer within {self._hang_s} s and was killed: {failure}"
        return InternalError(failure)

    def _await_child(self) -> None:
        """See to it that what waits for the next child does not do so for long."""
        if not self._waiting:
            return
        if self._state is _State.CLOSED:
            self._refuse_waiting(float("inf"))
            return
        now_s = time.monotonic()
        for flight in self._waiting:
            flight.since_s = flight.since_s or now_s
        if self._patience is None:
            self._patience = self.loop.call_later(self._options.restart_patience_s, self._on_impatience)

    def _on_impatience(self) -> None:
        self._patience = None
        if self._state is not _State.READY:
            self._refuse_waiting(time.monotonic() - self._options.restart_patience_s + 0.01)
            self._await_child()

    def _refuse_waiting(self, since_s: float) -> None:
        """Fail the flights that have waited since that time or before."""
        failure = self._unavailable()
        waiting, self._waiting = self._waiting, []
        for flight in waiting:
            if flight.since_s <= since_s:
                flight.finish(failure)
            else:
                self._waiting.append(flight)

    def _unavailable(self) -> UnavailableError:
        text = f"{self.name} {self._state.value}"
        if self._state is _State.WAITING:
            text += (
                f" in {max(0.0, self._restart_at_s - time.monotonic()):.1f} s"
                f" ({self._policy.num_crashes} crashes lately)"
            )
        return UnavailableError(f"{text}; last failure: {self._failure}" if self._failure is not None else text)

    def _ask_ready(self) -> bool:
        conversation = self._conversation
        # A child that executes a batch is as ready as it was before.
        if conversation is not None and not conversation.num_flights:
            self._readiness.ask(conversation)
        return self._readiness.is_ready

    def _trim(self, child: ChildProcess) -> None:
        if self._conversation is not None and self._conversation.child is child:
            with contextlib.suppress(PeerGoneError):  # whoever watches sees the end
                child.channel.trim()
                if not child.channel.has_leases:
                    self._num_trimmed = self._num_batches

    # ---- supervision: on the supervisor's thread

    def _supervise(self) -> None:
        try:
            self._keep_running()
        except Exception as error:
            _logger.exception("%s: the supervisor of the child process failed", self.name)
            with self._changed:
                self._state, self._child = _State.CLOSED, None
                self._failure = InternalError(f"{self.name} has no supervisor any more: {error!r}")
                self._changed.notify_all()
        self._post(self._await_child)

    def _keep_running(self) -> None:
        while True:
            failure = self._run_child()
            with self._changed:
                self._child = None
                self._failure = failure
                if not self._has_stood:
                    self._state = _State.CLOSED
                self._changed.notify_all()
                if self._state is _State.CLOSED or not self._pause():
                    return

    def _pause(self) -> bool:
        """Wait as long as the policy wants before the next start; False when the instance was closed meanwhile."""
        now_s = time.monotonic()
        pause_s = self._policy.pause_after_crash(now_s)
        self._state = _State.WAITING
        self._restart_at_s = now_s + pause_s
        _logger.error("%s; restart in %.2f s", str(self._failure).partition(";")[0], pause_s)
        if self._changed.wait_for(lambda: self._state is _State.CLOSED, pause_s):
            return False
        self._state = _State.STARTING
        return True

    def _run_child(self) -> ServerError:
        """Start a child and stay with it until its end; why it ended."""
        try:
            child = ChildProcess(self.name, self._options.environment, interpreter=self._options.interpreter)
        except OSError as error:
            return InternalError(f"cannot start a process for {self.name}: {error}")
        with self._changed:
            self._child = child
            if self._state is _State.CLOSED:
                child.kill()
        if not self._post(self._attach, child):
            child.kill()
        self._watch(child)
        with self._changed:
            # Whoever looks for a child must not find this one while its end is being told.
            self._state = _State.WAITING if self._state is _State.READY else self._state
        is_done = threading.Event()
        if self._post(self._detach, child, is_done):
            while not is_done.wait(1.0) and not self.loop.is_closed():
                continue
        child.channel.close()
        return self._start_failure or self._death_of(child)

    def _watch(self, child: ChildProcess) -> None:
        """Until the child's end; in a time without traffic both sides give memory back."""
        seen = self._num_trimmed = self._num_batches
        while child.exit_report is None:
            child.watch(timeout_s=self._options.idle_s)
            is_idle = seen == self._num_batches != self._num_trimmed
            seen = self._num_batches
            if is_idle:
                self._post(self._trim, child)


def call_in_process(
    name: str, recipe: Recipe, *, timeout_s: float, environment: Mapping[str, str], interpreter: str = ""
) -> Any:
    """What the recipe's function returns when a child process of its own calls it.

    Blocks. Raises the ServerError that the function raised, or InternalError when it dies or takes too long.
    """
    try:
        child = ChildProcess(name, environment, interpreter=interpreter)
    except OSError as error:
        raise InternalError(f"cannot start a process for {name}: {error}") from error
    try:
        return child.begin(recipe.message(is_call=True), timeout_s).result
    finally:
        child.kill()
        while child.exit_report is None:
            child.watch()
        child.channel.close()
