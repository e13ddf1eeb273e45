"""An instance with the worker that drives it, and those that share its model's requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelserver.backend import Placement
from modelserver.execution.instances import LoadedInstance, close_all
from modelserver.execution.workers import Worker

logger = logging.getLogger(__name__)

# How long a worker may take to see that its sequences were given up.
_GIVE_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """An instance as an operator sees it; a passive one never executes. `is_inline`: on the event loop.

    `pid` is the process that it lives in, if that is its own.
    """

    name: str
    placement: Placement
    is_busy: bool
    executions: int
    is_inline: bool
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class PooledInstance:
    """An instance and, unless it is passive, the worker that drives it. `leave` is called when it is gone."""

    loaded: LoadedInstance
    worker: Worker | None
    leave: Callable[[], None]

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for the worker; after that time give up what it has begun, and kill the instance's process."""
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
