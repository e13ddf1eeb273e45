"""Keeps a child process running: starts it, sees it end, and starts the next one, in a thread of its own."""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from modelserver.backend import InternalError, ServerError, UnavailableError
from modelserver.execution.process.child_process import ChildProcess
from modelserver.execution.process.recipe import RestartOptions, RestartPolicy
from modelserver.telemetry.measurement import ProcessRestarts, RestartReason

_logger = logging.getLogger(__name__)

# How long a child that hangs may take to show its stack before it is killed.
_STACK_S = 0.2

# How often to ask whether a start is still wanted.
_WANTED_POLL_S = 0.2


class State(enum.Enum):
    """The state of a child; the values complete the sentence "instance ..."."""

    STARTING = "is starting"
    READY = "is ready"
    WAITING = "crashed and waits to be restarted"
    CLOSED = "is closed"


@dataclass(frozen=True, slots=True)
class Death:
    """Why a child ended: the error of its requests, and the reason that is counted."""

    failure: ServerError
    reason: RestartReason


class SupervisedChild(Protocol):
    """A child that is started again after it died, as its owner handles it.

    All but `death_of` is called on the loop thread, through `post`.
    """

    def post(self, callback: Callable[..., object], *args: object) -> bool:
        """Call back on the loop thread; False when the loop is closed. From any thread."""

    def attach(self, child: ChildProcess) -> None:
        """A child was started: tell it what to build."""

    def detach(self, child: ChildProcess, is_done: threading.Event) -> None:
        """The child has ended. Sets `is_done` once its batches are answered or queued again."""

    def trim(self, child: ChildProcess) -> None:
        """There was no traffic for a while: give memory back."""

    def await_child(self) -> None:
        """There is no child, and there will be no other."""

    def death_of(self, child: ChildProcess) -> Death:
        """Why the child ended. From the supervisor's thread."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def num_batches(self) -> int:
        """The number of batches sent. Read from the supervisor's thread."""


class Supervisor:
    """The thread that supervises children, and its state, which `_changed` guards.

    The thread writes the state, except in `has_begun` (loop thread) and `close`.
    """

    def __init__(
        self,
        name: str,
        *,
        restart: RestartOptions,
        idle_s: float,
        environment: Mapping[str, str],
        interpreter: str,
        output_lines_per_s: int,
    ) -> None:
        self.state = State.STARTING
        self.num_trimmed = 0  # the number of batches when memory was given back
        # Counts restarts; may be replaced at any time.
        self.restarts = ProcessRestarts()
        self._name = name
        self._policy = RestartPolicy(restart)
        self._idle_s = idle_s
        self._environment = environment
        self._interpreter = interpreter
        self._output_lines_per_s = output_lines_per_s
        self._changed = threading.Condition()
        self._has_stood = False
        self._child: ChildProcess | None = None
        self._failure: ServerError | None = None  # why the last start failed or the last child died
        self._restart_at_s = 0.0
        self._thread: threading.Thread | None = None

    def start(self, supervised: SupervisedChild) -> None:
        """Keep a child of `supervised` running. Only the thread refers to it, so that there is no reference cycle."""
        self._thread = threading.Thread(
            target=self._supervise, args=(supervised,), name=f"supervise-{self._name}", daemon=True
        )
        self._thread.start()

    def wait_for_start(self, is_wanted: Callable[[], bool]) -> ServerError | None:
        """Wait until the first child is ready; else the error of why it is not. Blocks."""
        with self._changed:
            while not self._changed.wait_for(lambda: self.state is not State.STARTING, _WANTED_POLL_S):
                if not is_wanted():
                    break
        if self.state is State.STARTING:
            self.close(lambda: None, 0.0)
            return UnavailableError(f"{self._name} is not wanted any more; its start was ended")
        with self._changed:
            if self.state is not State.CLOSED or self._failure is None:
                return None
        self._join()
        return self._failure

    @property
    def pid(self) -> int | None:
        """The process id of the current child."""
        with self._changed:
            return self._child.pid if self._child is not None else None

    def has_begun(self) -> bool:
        """The child is ready; False if it is no longer wanted. Loop thread."""
        with self._changed:
            if self.state is not State.STARTING:
                return False
            self.state = State.READY
            self._has_stood = True
            self._changed.notify_all()
        return True

    def start_no_other(self) -> None:
        """Start no other child after the current one. From any thread."""
        with self._changed:
            self.state = State.CLOSED
            self._changed.notify_all()

    def close(self, finish: Callable[[], object], timeout_s: float) -> None:
        """Start no other child, and let this one `finish`. After `timeout_s` it shows its stack and is killed."""
        with self._changed:
            was_ready = self.state is State.READY
            self.state = State.CLOSED
            child = self._child
            self._changed.notify_all()
        if child is not None:
            if was_ready:
                finish()
                if not self._join(timeout_s):
                    _logger.warning("%s: still busy after %.1f s, killing it", self._name, timeout_s)
                    child.dump_stack()
                    self._join(_STACK_S)
            child.kill()
        self._join()

    def _join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end; False when time is up first."""
        assert self._thread is not None, "it was started"
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def unavailable(self) -> UnavailableError:
        """The error of requests while there is no child to send them to."""
        text = f"{self._name} {self.state.value}"
        if self.state is State.WAITING:
            text += (
                f" in {max(0.0, self._restart_at_s - time.monotonic()):.1f} s"
                f" ({self._policy.num_crashes} crashes lately)"
            )
        return UnavailableError(f"{text}; last failure: {self._failure}" if self._failure is not None else text)

    # ---- on the supervisor's thread

    def _supervise(self, supervised: SupervisedChild) -> None:
        try:
            self._keep_running(supervised)
        except Exception as error:
            _logger.exception("%s: the supervisor of the child process failed", self._name)
            with self._changed:
                self.state, self._child = State.CLOSED, None
                self._failure = InternalError(f"{self._name} has no supervisor any more: {error!r}")
                self._changed.notify_all()
        supervised.post(supervised.await_child)

    def _keep_running(self, supervised: SupervisedChild) -> None:
        while True:
            death = self._run_child(supervised)
            with self._changed:
                self._child = None
                self._failure = death.failure
                if not self._has_stood:
                    self.state = State.CLOSED
                self._changed.notify_all()
                if self.state is State.CLOSED or not self._pause():
                    return
            self.restarts.record(death.reason)

    def _pause(self) -> bool:
        """Wait before the next start as the policy says; False if the instance was closed meanwhile."""
        now_s = time.monotonic()
        pause_s = self._policy.pause_after_crash(now_s)
        self.state = State.WAITING
        self._restart_at_s = now_s + pause_s
        _logger.error("%s; restart in %.2f s", str(self._failure).partition(";")[0], pause_s)
        if self._changed.wait_for(lambda: self.state is State.CLOSED, pause_s):
            return False
        self.state = State.STARTING
        return True

    def _run_child(self, supervised: SupervisedChild) -> Death:
        """Start a child, watch it until it ends, and return why it ended."""
        try:
            child = ChildProcess(
                self._name,
                self._environment,
                interpreter=self._interpreter,
                output_lines_per_s=self._output_lines_per_s,
            )
        except OSError as error:
            failure = InternalError(f"cannot start a process for {self._name}: {error}")
            return Death(failure, RestartReason.NOT_STARTED)
        with self._changed:
            self._child = child
            if self.state is State.CLOSED:
                child.kill()
        if not supervised.post(supervised.attach, child):
            child.kill()
        self._watch(supervised, child)
        with self._changed:
            has_stood = self.state is not State.STARTING
            # This child must not be found while its end is being handled.
            self.state = State.WAITING if self.state is State.READY else self.state
        is_done = threading.Event()
        if supervised.post(supervised.detach, child, is_done):
            while not is_done.wait(1.0) and not supervised.loop.is_closed():
                continue
        child.channel.close()
        death = supervised.death_of(child)
        return death if has_stood else replace(death, reason=RestartReason.NOT_STARTED)

    def _watch(self, supervised: SupervisedChild, child: ChildProcess) -> None:
        """Watch the child until it ends. Without traffic, let both sides give memory back."""
        seen = self.num_trimmed = supervised.num_batches
        while child.exit_report is None:
            child.watch(timeout_s=self._idle_s)
            is_idle = seen == supervised.num_batches != self.num_trimmed
            seen = supervised.num_batches
            if is_idle:
                supervised.post(supervised.trim, child)
