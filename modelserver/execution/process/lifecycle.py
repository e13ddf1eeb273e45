"""The state of a supervised child process, which its supervisor, its owner on the loop and its instance share."""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass

from modelserver.backend import ServerError, UnavailableError
from modelserver.execution.process.child_process import ChildProcess
from modelserver.execution.process.recipe import RestartOptions, RestartPolicy
from modelserver.telemetry.measurement import ProcessRestarts, RestartReason


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


class Lifecycle:
    """Where a child is between its first start and its end. `changed` guards all of it.

    The supervisor's thread writes it, except in `has_begun`, `start_no_other`, and when the instance closes.
    """

    def __init__(self, name: str, restart: RestartOptions) -> None:
        self.name = name
        self.policy = RestartPolicy(restart)
        self.changed = threading.Condition()
        self.state = State.STARTING
        self.has_stood = False
        self.child: ChildProcess | None = None
        # Why the last start failed or the last child died.
        self.failure: ServerError | None = None
        self.restart_at_s = 0.0
        # Counts restarts; may be replaced at any time.
        self.restarts = ProcessRestarts()

    @property
    def pid(self) -> int | None:
        """The process id of the current child."""
        with self.changed:
            return self.child.pid if self.child is not None else None

    def has_begun(self) -> bool:
        """The child is ready; False if it is no longer wanted. Loop thread."""
        with self.changed:
            if self.state is not State.STARTING:
                return False
            self.state = State.READY
            self.has_stood = True
            self.changed.notify_all()
        return True

    def start_no_other(self) -> None:
        """Start no other child after the current one. From any thread."""
        with self.changed:
            self.state = State.CLOSED
            self.changed.notify_all()

    def unavailable(self) -> UnavailableError:
        """The error of requests while there is no child to send them to."""
        text = f"{self.name} {self.state.value}"
        if self.state is State.WAITING:
            text += (
                f" in {max(0.0, self.restart_at_s - time.monotonic()):.1f} s ({self.policy.num_crashes} crashes lately)"
            )
        return UnavailableError(f"{text}; last failure: {self.failure}" if self.failure is not None else text)
