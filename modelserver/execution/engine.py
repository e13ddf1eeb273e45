"""What answers the requests of a loaded model: its own instances, or the models of an ensemble."""

from __future__ import annotations

import abc
import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn

from modelserver.backend import Backend, Placement
from modelserver.config.schema import ModelConfig
from modelserver.core.clock import Clock
from modelserver.errors import UnsupportedError
from modelserver.execution.instances import LoadedInstance, close_all
from modelserver.execution.workers import Worker
from modelserver.scheduling.ensemble import Binding, EnsembleScheduler, FindHolder
from modelserver.scheduling.ensemble_plan import StepModel
from modelserver.scheduling.scheduler import Scheduler
from modelserver.telemetry.measurement import Measurement
from modelserver.telemetry.statistics import ModelStatistics

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


class Leavers:
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
            name = f"leaving {member.loaded.name}"
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
        self.leavers = Leavers()

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
