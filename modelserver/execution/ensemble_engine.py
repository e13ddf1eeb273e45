"""The engine of an ensemble: a scheduler that calls other models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from modelserver.backend import Backend, Placement
from modelserver.config.schema import ModelConfig
from modelserver.core.clock import Clock
from modelserver.errors import UnsupportedError
from modelserver.execution.engine import Engine
from modelserver.execution.pooled_instance import PooledInstance
from modelserver.scheduling.ensemble import Binding, EnsembleScheduler, FindHolder
from modelserver.scheduling.ensemble_plan import StepModel
from modelserver.telemetry.measurement import Measurement
from modelserver.telemetry.statistics import ModelStatistics


class EnsembleBackend(Backend):
    """Stands where other models have a backend: an ensemble has no files, and no instances."""

    option_names = frozenset[str]()

    def create_instance(self, placement: Placement) -> NoReturn:
        raise UnsupportedError(f"ensemble '{self.context.model_name}' has no instances: {placement.name}")


class EnsembleEngine(Engine):
    """Made unbound: it takes no requests until it is told which models its steps call."""

    calls_models = True

    def __init__(
        self, backend: Backend, *, loop: asyncio.AbstractEventLoop, statistics: ModelStatistics, clock: Clock
    ) -> None:
        super().__init__()
        self._backend = backend
        self._config = backend.context.config
        self.scheduler: EnsembleScheduler = EnsembleScheduler(
            self._config, loop=loop, statistics=statistics, clock=clock
        )
        statistics.inflight = lambda: self.scheduler.inflight

    def bind(self, models: Sequence[StepModel] | None, fault: str, find_holder: FindHolder | None) -> bool:
        binding = Binding(self._config, models, find_holder) if models is not None else None
        for model in models or ():
            model.statistics.is_traced = True  # whoever executes its batches tells the requests' notes
        self.scheduler.bind(binding, fault)
        return binding.is_decoupled if binding is not None else self._config.is_decoupled

    def measure(self) -> list[Sequence[Measurement]]:
        return [self.scheduler.step_counts.measure()]

    def update(self, config: ModelConfig) -> tuple[int, list[PooledInstance]]:
        """There are no instances: the other `instance_group` is only shown."""
        self._backend.context = replace(self._backend.context, config=config)
        return 0, []

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002
        """There is nothing to wait for."""
        return True
