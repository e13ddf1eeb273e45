"""Instances with the workers that drive them: as an operator sees them, and how they are stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelserver.backend import Placement
from modelserver.execution.instances import LoadedInstance, close_all
from modelserver.execution.workers import Worker

logger = logging.getLogger(__name__)

# How long a worker may take to notice that its sequences were ended.
_GIVE_UP_S = 1.0
# Longer than a server lives, but short enough for the clock of threads.
_NO_END_S = 1e8


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """An instance as an operator sees it; a passive one never executes. `is_inline`: it executes on the event loop.

    `pid` is its own process, if it has one.
    """

    name: str
    placement: Placement
    is_busy: bool
    executions: int
    is_inline: bool
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class PooledInstance:
    """An instance and, unless it is passive, the worker that drives it. `leave` is called when it is closed."""

    loaded: LoadedInstance
    worker: Worker | None
    leave: Callable[[], None]

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for the worker; after that time end its work, and kill the instance's process."""
        if self.worker is None or self.worker.join(timeout_s):
            return True
        self.worker.give_up()
        if self.loaded.process is not None:
            self.loaded.process.kill("was closed while it executed")
        return self.worker.join(_GIVE_UP_S)

    @property
    def is_ready(self) -> bool:
        """Whether it can execute now."""
        is_broken = self.worker is not None and self.worker.runner.is_broken
        return not is_broken and self.loaded.instance.is_ready()

    def info(self) -> InstanceInfo:
        worker = self.worker
        return InstanceInfo(
            self.loaded.name,
            self.loaded.plan.placement,
            is_busy=worker is not None and worker.runner.is_busy,
            executions=worker.runner.num_executions if worker is not None else 0,
            is_inline=worker is not None and worker.is_inline,
            pid=self.loaded.process.pid if self.loaded.process is not None else None,
        )


class DrainingInstances:
    """Instances that a model has no place for any more, but whose sequences go on.

    One thread at a time calls it.
    """

    def __init__(self) -> None:
        self._waiting: dict[threading.Thread, PooledInstance] = {}

    def stop(self, members: Sequence[PooledInstance], timeout_s: float) -> None:
        """Stop the instances now, or those with sequences when these have ended. Blocking for the former only."""
        idle: list[PooledInstance] = []
        self._waiting = {thread: member for thread, member in self._waiting.items() if thread.is_alive()}
        for member in members:
            if member.worker is not None:
                member.worker.close()
            if member.worker is None or not member.worker.num_sequences:
                idle.append(member)
                continue
            name = f"draining {member.loaded.name}"
            thread = threading.Thread(target=stop_instances, args=([member], _NO_END_S), name=name, daemon=True)
            self._waiting[thread] = member
            thread.start()
        stop_instances(idle, timeout_s)

    def end(self, timeout_s: float) -> bool:
        """End the sequences that still go on after that time; False when an instance still executes. Blocking."""
        deadline_s = time.monotonic() + timeout_s
        for thread, member in self._waiting.items():
            member.has_ended(max(0.0, deadline_s - time.monotonic()))
            thread.join(max(_GIVE_UP_S, deadline_s - time.monotonic()))
        self._waiting = {thread: member for thread, member in self._waiting.items() if thread.is_alive()}
        return not self._waiting


def stop_instances(members: Sequence[PooledInstance], timeout_s: float) -> bool:
    """Let the workers end and close their instances; False when one did not end in time. Blocking."""
    deadline_s = time.monotonic() + timeout_s
    for member in members:
        if member.worker is not None:
            member.worker.close()
    all_ended = True
    for member in members:
        if member.has_ended(max(0.0, deadline_s - time.monotonic())):
            if member.worker is not None:
                member.worker.runner.close(deadline_s)
            close_all([member.loaded])
        else:
            all_ended = False
            logger.error(
                "instance '%s' still executes after %.1f s. It is part of the server's process and cannot be killed: "
                "it is abandoned, with its memory, until the server ends",
                member.loaded.name,
                timeout_s,
            )
        member.leave()
    return all_ended
