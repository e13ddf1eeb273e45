"""What answers the requests of a loaded model: its own instances, or the models of an ensemble."""

from __future__ import annotations

import abc
import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, NoReturn

from modelserver.backend import Backend, Placement
from modelserver.config.schema import ModelConfig
from modelserver.core.clock import Clock
from modelserver.errors import UnsupportedError
from modelserver.execution.pooled_instances import DrainingInstances, PooledInstance
from modelserver.scheduling.ensemble import Binding, EnsembleScheduler, FindHolder
from modelserver.scheduling.ensemble_plan import StepModel
from modelserver.scheduling.scheduler import Scheduler
from modelserver.telemetry.measurement import Measurement
from modelserver.telemetry.statistics import ModelStatistics


class Engine(abc.ABC):
    """Takes requests through `scheduler`.

    `lock` lets one thread at a time change the engine: callers of `update` and `close` hold it. `members` is
    replaced, never changed, so that any thread may read it.
    """

    scheduler: Scheduler
    # Whether other models answer the requests. `bind` names them; until then no requests are accepted.
    calls_models: ClassVar[bool] = False

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.members: tuple[PooledInstance, ...] = ()
        self.draining = DrainingInstances()

    @abc.abstractmethod
    def measure(self) -> list[Sequence[Measurement]]:
        """Further numbers for the metrics page, per instance in the order of the config. Loop thread."""

    @abc.abstractmethod
    def update(self, config: ModelConfig) -> tuple[int, list[PooledInstance]]:
        """Apply a changed `instance_group`: how many instances were added, and those to stop now.

        Blocking. Raises ServerError, with nothing changed, when an instance cannot be made.
        """

    def bind(self, models: Sequence[StepModel] | None, fault: str, find_holder: FindHolder | None) -> bool:
        """Call these models, or none because of `fault`; whether requests may get several answers. Loop thread."""
        raise NotImplementedError(f"{type(self).__name__} calls no models: {fault}, {models}, {find_holder}")

    def stop(self) -> None:
        """Refuse new requests. Event loop thread; safe to repeat."""
        self.scheduler.stop()

    @abc.abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Free everything; False when an instance still executes after that time. Blocking."""


class EnsembleBackend(Backend):
    """The backend of an ensemble, which has no files and no instances."""

    option_names = frozenset[str]()

    def create_instance(self, placement: Placement) -> NoReturn:
        raise UnsupportedError(f"ensemble '{self.context.model_name}' has no instances: {placement.name}")


class EnsembleEngine(Engine):
    """The engine of an ensemble: a scheduler that calls other models. It takes no requests until `bind`."""

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
            model.statistics.is_traced = True  # so that the requests of steps learn their durations
        self.scheduler.bind(binding, fault)
        return binding.is_decoupled if binding is not None else self._config.is_decoupled

    def measure(self) -> list[Sequence[Measurement]]:
        return [self.scheduler.step_counts.measure()]

    def update(self, config: ModelConfig) -> tuple[int, list[PooledInstance]]:
        """There are no instances: the changed `instance_group` is only shown."""
        self._backend.context = replace(self._backend.context, config=config)
        return 0, []

    def close(self, timeout_s: float) -> bool:  # noqa: ARG002
        """An ensemble has no worker to wait for."""
        return True
