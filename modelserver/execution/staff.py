"""Instances and the workers that drive them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from modelserver.backend import Placement
from modelserver.execution.inline_worker import DirectWorker, InlineWorker
from modelserver.execution.instances import LoadedInstance, close_all
from modelserver.execution.worker import Worker

logger = logging.getLogger(__name__)

AnyWorker = Worker | InlineWorker | DirectWorker


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """An instance as an operator sees it; a passive one never executes. `is_inline`: on the event loop."""

    name: str
    placement: Placement
    is_busy: bool
    executions: int
    is_inline: bool


@dataclass(frozen=True, slots=True)
class StaffedInstance:
    """An instance and, unless it is passive, the worker that drives it."""

    loaded: LoadedInstance
    worker: AnyWorker | None

    @property
    def can_execute(self) -> bool:
        return self.worker is not None and self.loaded.instance.can_execute()

    def info(self) -> InstanceInfo:
        runner = self.worker.runner if self.worker is not None else None
        return InstanceInfo(
            self.loaded.name,
            self.loaded.plan.placement,
            is_busy=runner is not None and runner.is_busy,
            executions=runner.num_executions if runner is not None else 0,
            is_inline=isinstance(self.worker, InlineWorker | DirectWorker),
        )


def dismiss(staffed: Sequence[StaffedInstance], timeout_s: float) -> bool:
    """Let the workers end and close their instances; False when one did not end in time. Blocking."""
    deadline_s = time.monotonic() + timeout_s
    for each in staffed:
        if each.worker is not None:
            each.worker.close()
    all_ended = True
    for each in staffed:
        if each.worker is None or each.worker.join(max(0.0, deadline_s - time.monotonic())):
            close_all([each.loaded])
        else:
            all_ended = False
            logger.error("instance '%s' still executes after %.1f s and is abandoned", each.loaded.name, timeout_s)
    return all_ended
