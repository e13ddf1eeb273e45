"""An instance in a child process of its own: supervised, restarted, and as quick to call as shared memory allows."""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from modelserver.backend import (
    BatchInstance,
    InferRequest,
    InferResponse,
    InternalError,
    ServerError,
    UnavailableError,
)
from modelserver.execution.channel import PeerGoneError
from modelserver.execution.child_process import ChildProcess
from modelserver.execution.messages import (
    Answer,
    Began,
    Begin,
    Execute,
    Executed,
    Finish,
    Query,
    Readiness,
    RequestRecord,
)
from modelserver.execution.packing import Payload
from modelserver.execution.readiness import ReadinessProbe
from modelserver.execution.records import request_record, response_of
from modelserver.execution.restart import RestartOptions, RestartPolicy

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a child builds its instance: it calls `target` ("module:function") with `arguments`.

    The function returns a BatchInstance. Arguments are what msgpack can carry; `python_path` is put in front
    of the child's sys.path.
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()

    def message(self, *, is_call: bool) -> Begin:
        return Begin(
            target=self.target, arguments=dict(self.arguments), python_path=list(self.python_path), is_call=is_call
        )


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Limits and environment of a child process; `execute_timeout_s` None trusts the instance to come back."""

    start_timeout_s: float = 300.0
    execute_timeout_s: float | None = None
    close_timeout_s: float = 10.0
    # How long a batch waits for a child that is being restarted before it fails UNAVAILABLE.
    restart_patience_s: float = 5.0
    # After this long without traffic, shared memory beyond a few megabytes goes back to the system.
    idle_s: float = 15.0
    restart: RestartOptions = field(default_factory=RestartOptions)
    environment: Mapping[str, str] = field(default_factory=dict)


class _State(enum.Enum):
    STARTING = "is starting"
    READY = "is ready"
    WAITING = "crashed and waits to be restarted"
    CLOSED = "is closed"


class ProcessInstance(BatchInstance):
    """Hosts any instance in a child process and executes its batches there.

    The constructor blocks until the instance stands; it raises the ServerError that building it raised. A
    supervisor thread owns each child from start to end: it logs the output, notices the end, and starts the next.
    """

    def __init__(self, name: str, recipe: Recipe, options: ProcessOptions | None = None) -> None:
        self.name = name
        self._recipe = recipe
        self._options = options or ProcessOptions()
        self._policy = RestartPolicy(self._options.restart)
        # Guards the fields below; notified when they change.
        self._changed = threading.Condition()
        self._state = _State.STARTING
        self._child: ChildProcess | None = None
        self._failure: ServerError | None = None  # why the last start failed or the last child died
        self._restart_at_s = 0.0
        # Held by whoever uses the child's channel.
        self._channel_lock = threading.Lock()
        self._num_batches = 0
        self._readiness = ReadinessProbe()
        self._supervisor = threading.Thread(target=self._supervise, name=f"supervise-{name}", daemon=True)
        self._supervisor.start()
        self._wait_for_start()

    @property
    def pid(self) -> int | None:
        """The process id of the child that lives now."""
        with self._changed:
            return self._child.pid if self._child is not None else None

    takes_several_batches = True

    def execute(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | ServerError]:
        """One batch in the child. Raises UnavailableError while the child is down, InternalError when it dies."""
        (result,) = self.execute_batches([requests])
        if isinstance(result, ServerError):
            raise result
        return result

    def execute_batches(
        self, batches: Sequence[Sequence[InferRequest]]
    ) -> Sequence[Sequence[InferResponse | ServerError] | ServerError]:
        """Batches in the child, one after the other, with one message there and one back; raises as `execute`."""
        while True:
            child = self._ready_child()
            try:
                with self._channel_lock:
                    self._num_batches += len(batches)
                    return self._execute_in(child, batches)
            except PeerGoneError as error:
                failure = self._end_of(child)
                # Batches that the child never saw go to the next one; those that may have killed it never do.
                if not error.was_unread:
                    raise failure from None
            except TimeoutError:
                raise self._stop_hanging(child) from None

    def is_ready(self) -> bool:
        """Whether the child is up and, where its instance has an opinion, ready. Waits 50 ms at most."""
        with self._changed:
            child = self._child if self._state is _State.READY else None
        if child is None:
            return False
        # A child that executes a batch is as ready as it was before.
        if self._readiness.is_asked and self._channel_lock.acquire(blocking=False):
            try:
                self._readiness.ask(child)
            except PeerGoneError:
                return False
            finally:
                self._channel_lock.release()
        return self._readiness.is_ready

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
                deadline_s = time.monotonic() + self._options.close_timeout_s
                if self._channel_lock.acquire(timeout=self._options.close_timeout_s):
                    with contextlib.suppress(PeerGoneError):
                        child.channel.send(Finish())
                    self._channel_lock.release()
                self._supervisor.join(max(0.0, deadline_s - time.monotonic()))
                if self._supervisor.is_alive():
                    _logger.warning("%s: still busy after %.1f s, killing it", self.name, self._options.close_timeout_s)
                    child.dump_stack()
                    self._supervisor.join(0.2)
            child.kill()
        self._supervisor.join()

    def _wait_for_start(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._state is not _State.STARTING)
            if self._state is not _State.CLOSED or self._failure is None:
                return
            failure = self._failure
        self._supervisor.join()
        raise failure

    # ---- conversation: on the worker's thread

    def _execute_in(
        self, child: ChildProcess, batches: Sequence[Sequence[InferRequest]]
    ) -> list[Sequence[InferResponse | ServerError] | ServerError]:
        payload = Payload()
        sendings = [_Sending(requests, payload) for requests in batches]
        sent = [request for sending in sendings for request in sending.sent]
        if not sent:
            return [sending.results([]) for sending in sendings]
        records = [record for sending in sendings for record in sending.records]
        sizes = [len(sending.sent) for sending in sendings if sending.sent]
        child.channel.send(Execute(requests=records, sizes=sizes), payload)
        answers = iter(self._answer(child, sent, sizes))
        return [sending.results(next(answers) if sending.sent else []) for sending in sendings]

    def _answer(
        self, child: ChildProcess, requests: Sequence[InferRequest], sizes: Sequence[int]
    ) -> list[list[InferResponse | ServerError] | ServerError]:
        has_begun = False
        while True:
            try:
                message, payload = child.channel.receive()
            except PeerGoneError as error:
                # After a query it is the answer that was unread, not the batch.
                raise PeerGoneError(was_unread=error.was_unread and not has_begun) from None
            if isinstance(message, Executed):
                responses = (response_of(record, payload) for record in message.responses)
                return [
                    list(islice(responses, size)) if error is None else error.error()
                    for size, error in zip(sizes, message.errors, strict=True)
                ]
            if isinstance(message, Query):
                has_begun = True
                with contextlib.suppress(PeerGoneError):  # the next receive tells
                    child.channel.send(Answer(value=_answer_query(message, requests)))
            elif isinstance(message, Readiness):
                self._readiness.record(message)
            else:
                raise InternalError(f"{self.name}: unexpected message {type(message).__name__} from the child process")

    def _ready_child(self) -> ChildProcess:
        """The child, when it is ready within `restart_patience_s`; else UnavailableError."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._state in (_State.READY, _State.CLOSED), self._options.restart_patience_s
            )
            if self._state is _State.READY and self._child is not None:
                return self._child
            text = f"{self.name} {self._state.value}"
            if self._state is _State.WAITING:
                text += (
                    f" in {max(0.0, self._restart_at_s - time.monotonic()):.1f} s"
                    f" ({self._policy.num_crashes} crashes lately)"
                )
            raise UnavailableError(f"{text}; last failure: {self._failure}" if self._failure is not None else text)

    def _end_of(self, child: ChildProcess) -> ServerError:
        """Why `child` ended; kills it when it only hung up."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._child is not child, timeout=1.0):
                child.kill()
                self._changed.wait_for(lambda: self._child is not child)
        return InternalError(f"the process of {self.name} {child.exit_report}")

    def _stop_hanging(self, child: ChildProcess) -> ServerError:
        child.dump_stack()
        time.sleep(0.1)  # the stack shall reach the log and the error before the kill
        child.kill()
        failure = self._end_of(child)
        return InternalError(
            f"{self.name} did not answer within {self._options.execute_timeout_s} s and was killed: {failure}"
        )

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

    def _keep_running(self) -> None:
        is_first = True
        while True:
            failure = self._run_child()
            with self._changed:
                has_failed_first = is_first and self._state is _State.STARTING
                is_first = False
                self._child = None
                self._failure = failure
                if has_failed_first:
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
            child = ChildProcess(self.name, self._options.environment)
        except OSError as error:
            return InternalError(f"cannot start a process for {self.name}: {error}")
        with self._changed:
            self._child = child
            if self._state is _State.CLOSED:
                child.kill()
        failure: ServerError | None = None
        try:
            began = child.begin(self._recipe.message(is_call=False), self._options.start_timeout_s)
        except ServerError as error:
            failure = error
            child.kill()
        else:
            self._on_began(child, began)
        self._watch(child)
        with self._channel_lock:
            child.channel.close()
        return failure or InternalError(f"the process of {self.name} {child.exit_report}")

    def _on_began(self, child: ChildProcess, began: Began) -> None:
        child.channel.set_receive_timeout(self._options.execute_timeout_s)
        self._readiness = ReadinessProbe(is_asked=began.has_readiness)
        with self._changed:
            if self._state is _State.STARTING:
                self._state = _State.READY
                self._changed.notify_all()
            else:
                child.kill()  # closed meanwhile

    def _watch(self, child: ChildProcess) -> None:
        """Until the child's end; in a time without traffic both sides give memory back."""
        seen = trimmed = self._num_batches
        while child.exit_report is None:
            child.watch(timeout_s=self._options.idle_s)
            is_idle = seen == self._num_batches != trimmed
            seen = self._num_batches
            if is_idle and self._channel_lock.acquire(blocking=False):
                try:
                    trimmed = self._num_batches
                    child.channel.trim()
                except PeerGoneError:
                    continue  # watch sees the end
                finally:
                    self._channel_lock.release()


class _Sending:
    """One batch on its way: what is sent, and the requests that cannot be."""

    __slots__ = ("records", "refused", "sent")

    def __init__(self, requests: Sequence[InferRequest], payload: Payload) -> None:
        self.records: list[RequestRecord] = []
        self.sent: list[InferRequest] = []
        self.refused: dict[int, ServerError] = {}
        for index, request in enumerate(requests):
            try:
                self.records.append(request_record(request, payload))
                self.sent.append(request)
            except ServerError as error:
                self.refused[index] = error

    def results(
        self, answered: Sequence[InferResponse | ServerError] | ServerError
    ) -> Sequence[InferResponse | ServerError] | ServerError:
        """One entry for each request of the batch, from what came back for those that were sent."""
        if isinstance(answered, ServerError) or not self.refused:
            return answered
        entries = iter(answered)
        count = len(self.sent) + len(self.refused)
        return [self.refused[index] if index in self.refused else next(entries) for index in range(count)]


def call_in_process(name: str, recipe: Recipe, *, timeout_s: float, environment: Mapping[str, str]) -> Any:
    """What the recipe's function returns when a child process of its own calls it.

    Blocks. Raises the ServerError that the function raised, or InternalError when it dies or takes too long.
    """
    try:
        child = ChildProcess(name, environment)
    except OSError as error:
        raise InternalError(f"cannot start a process for {name}: {error}") from error
    try:
        return child.begin(recipe.message(is_call=True), timeout_s).result
    finally:
        child.kill()
        while child.exit_report is None:
            child.watch()
        child.channel.close()


def _answer_query(query: Query, requests: Sequence[InferRequest]) -> bool:
    assert query.topic == "is_cancelled", f"unknown query {query.topic!r}"
    index: int = query.argument
    return requests[index].is_cancelled
