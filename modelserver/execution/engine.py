"""What answers the requests of a loaded model: instances of its own, or the models of an ensemble."""

from __future__ import annotations

import abc
import threading
from collections.abc import Sequence
from typing import ClassVar

from modelserver.config.schema import ModelConfig
from modelserver.execution.pooled_instance import PooledInstance
from modelserver.scheduling.ensemble import FindHolder
from modelserver.scheduling.ensemble_plan import StepModel
from modelserver.scheduling.scheduler import Scheduler
from modelserver.telemetry.measurement import Measurement


class Engine(abc.ABC):
    """Takes requests through `scheduler`.

    `lock` lets one thread at a time change the engine: whoever calls `update` or `close` holds it. `members` is
    replaced, never changed, so that any thread may read it.
    """

    scheduler: Scheduler
    # Requests are answered by other models, which `bind` names: until then none are accepted.
    calls_models: ClassVar[bool] = False

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.members: tuple[PooledInstance, ...] = ()

    @abc.abstractmethod
    def measure(self) -> list[Sequence[Measurement]]:
        """What the metrics page shows besides statistics, per instance in the order of the config. Loop thread."""

    @abc.abstractmethod
    def update(self, config: ModelConfig) -> tuple[int, list[PooledInstance]]:
        """Follow another `instance_group`; how many instances were added, and those that are to be stopped now.

        Blocking. Raises ServerError, with nothing changed, when an instance cannot be made.
        """

    def bind(self, models: Sequence[StepModel] | None, fault: str, find_holder: FindHolder | None) -> bool:
        """Call these models, or none and say why; whether it may then answer more than once. Event loop thread."""
        raise NotImplementedError(f"{type(self).__name__} calls no models: {fault}, {models}, {find_holder}")

    def stop(self) -> None:
        """Refuse new requests. Event loop thread; safe to repeat."""
        self.scheduler.stop()

    @abc.abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Free everything; False when an instance still executes after that time. Blocking."""
