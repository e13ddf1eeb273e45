"""Keeps a child process running: starts it, sees it end, and starts the next one, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from modelserver.backend import InternalError, ServerError, UnavailableError
from modelserver.execution.process.child_process import ChildProcess
from modelserver.execution.process.lifecycle import Death, Lifecycle, State
from modelserver.execution.process.recipe import ProcessOptions
from modelserver.execution.process.supervised_child import SupervisedChild
from modelserver.telemetry.measurement import RestartReason

_logger = logging.getLogger(__name__)

# How long a child that hangs may take to show its stack before it is killed.
_STACK_S = 0.2

# How often to ask whether a start is still wanted.
_WANTED_POLL_S = 0.2


class Supervisor:
    """The thread that supervises one child; it begins at once."""

    def __init__(self, supervised: SupervisedChild, life: Lifecycle, options: ProcessOptions) -> None:
        self._supervised = supervised
        self._life = life
        self._options = options
        self._thread = threading.Thread(target=self._supervise, name=f"supervise-{life.name}", daemon=True)
        self._thread.start()

    def wait_for_start(self) -> ServerError | None:
        """Wait until the first child is ready; else the error of why it is not. Blocks."""
        life = self._life
        with life.changed:
            while not life.changed.wait_for(lambda: life.state is not State.STARTING, _WANTED_POLL_S):
                if not self._options.is_wanted():
                    break
        if life.state is State.STARTING:
            self.close()
            return UnavailableError(f"{life.name} is not wanted any more; its start was ended")
        with life.changed:
            if life.state is not State.CLOSED or life.failure is None:
                return None
        self._thread.join()
        return life.failure

    def close(self) -> None:
        """Start no other child, and let this one finish. After `close_timeout_s` it shows its stack and is killed."""
        life = self._life
        with life.changed:
            was_ready = life.state is State.READY
            life.state = State.CLOSED
            child = life.child
            life.changed.notify_all()
        if child is not None:
            if was_ready:
                timeout_s = self._options.close_timeout_s
                self._supervised.post(self._supervised.finish)
                self._thread.join(timeout_s)
                if self._thread.is_alive():
                    _logger.warning("%s: still busy after %.1f s, killing it", life.name, timeout_s)
                    child.dump_stack()
                    self._thread.join(_STACK_S)
            child.kill()
        self._thread.join()

    # On the supervisor's thread.

    def _supervise(self) -> None:
        life = self._life
        try:
            self._keep_running()
        except Exception as error:
            _logger.exception("%s: the supervisor of the child process failed", life.name)
            with life.changed:
                life.state, life.child = State.CLOSED, None
                life.failure = InternalError(f"{life.name} has no supervisor any more: {error!r}")
                life.changed.notify_all()
        self._supervised.post(self._supervised.await_child)

    def _keep_running(self) -> None:
        life = self._life
        while True:
            death = self._run_child()
            with life.changed:
                life.child = None
                life.failure = death.failure
                if not life.has_stood:
                    life.state = State.CLOSED
                life.changed.notify_all()
                if life.state is State.CLOSED or not self._pause():
                    return
            life.restarts.record(death.reason)

    def _pause(self) -> bool:
        """Wait before the next start as the policy says; False if the instance was closed meanwhile."""
        life, now_s = self._life, time.monotonic()
        pause_s = life.policy.pause_after_crash(now_s)
        life.state = State.WAITING
        life.restart_at_s = now_s + pause_s
        _logger.error("%s; restart in %.2f s", str(life.failure).partition(";")[0], pause_s)
        if life.changed.wait_for(lambda: life.state is State.CLOSED, pause_s):
            return False
        life.state = State.STARTING
        return True

    def _run_child(self) -> Death:
        """Start a child, watch it until it ends, and return why it ended."""
        life, supervised, options = self._life, self._supervised, self._options
        try:
            child = ChildProcess(
                life.name,
                options.environment,
                interpreter=options.interpreter,
                output_lines_per_s=options.output_lines_per_s,
            )
        except OSError as error:
            failure = InternalError(f"cannot start a process for {life.name}: {error}")
            return Death(failure, RestartReason.NOT_STARTED)
        with life.changed:
            life.child = child
            if life.state is State.CLOSED:
                child.kill()
        if not supervised.post(supervised.attach, child):
            child.kill()
        self._watch(child)
        with life.changed:
            has_stood = life.state is not State.STARTING
            # This child must not be found while its end is being handled.
            life.state = State.WAITING if life.state is State.READY else life.state
        is_done = threading.Event()
        if supervised.post(supervised.detach, child, is_done):
            while not is_done.wait(1.0) and not supervised.loop.is_closed():
                continue
        child.channel.close()
        death = supervised.death_of(child)
        return death if has_stood else replace(death, reason=RestartReason.NOT_STARTED)

    def _watch(self, child: ChildProcess) -> None:
        """Watch the child until it ends. Without traffic, let both sides give memory back."""
        supervised = self._supervised
        seen = supervised.num_trimmed = supervised.num_batches
        while child.exit_report is None:
            child.watch(timeout_s=self._options.idle_s)
            is_idle = seen == supervised.num_batches != supervised.num_trimmed
            seen = supervised.num_batches
            if is_idle:
                supervised.post(supervised.trim, child)
