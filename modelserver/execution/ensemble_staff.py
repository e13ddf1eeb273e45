"""What an ensemble has in place of instances: a scheduler that calls other models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import NoReturn

from modelserver.backend import Backend, Placement
from modelserver.core.clock import Clock
from modelserver.errors import UnsupportedError
from modelserver.execution.staffed_instance import StaffedInstance
from modelserver.scheduling.ensemble import Binding, EnsembleScheduler, FindHolder
from modelserver.scheduling.ensemble_plan import StepModel
from modelserver.telemetry.measurement import Measurement
from modelserver.telemetry.statistics import ModelStatistics


class EnsembleBackend(Backend):
    """Stands where other models have a backend: an ensemble has no files, and no instances."""

    option_names = frozenset[str]()

    def create_instance(self, placement: Placement) -> NoReturn:
        raise UnsupportedError(f"ensemble '{self.context.model_name}' has no instances: {placement.name}")


class EnsembleStaff:
    """As `Staff`, of nobody. Made unbound: it takes no requests until it is told which models its steps call."""

    members: tuple[StaffedInstance, ...] = ()

    def __init__(
        self, backend: Backend, *, loop: asyncio.AbstractEventLoop, statistics: ModelStatistics, clock: Clock
    ) -> None:
        self.lock = threading.Lock()
        self._config = backend.context.config
        self.scheduler = EnsembleScheduler(self._config, loop=loop, statistics=statistics, clock=clock)
        statistics.inflight = lambda: self.scheduler.inflight

    def bind(self, models: Sequence[StepModel] | None, fault: str, find_holder: FindHolder | None) -> bool:
        """Call these models, or none and say why; whether it may then answer more than once. Event loop thread."""
        binding = Binding(self._config, models, find_holder) if models is not None else None
        for model in models or ():
            model.statistics.is_traced = True  # whoever executes its batches tells the requests' notes
        self.scheduler.bind(binding, fault)
        return binding.is_decoupled if binding is not None else self._config.is_decoupled

    def measure(self) -> list[Sequence[Measurement]]:
        """What is to be told of its steps. Event loop thread."""
        return [self.scheduler.step_counts.measure()]

    def stop(self) -> None:
        """Refuse new requests. Event loop thread; safe to repeat."""
        self.scheduler.stop()

    def close(self, _timeout_s: float) -> bool:
        """There is nothing to wait for."""
        return True
