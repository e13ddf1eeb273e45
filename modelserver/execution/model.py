"""One loaded version of a model: its backend, its instances with their workers, its scheduler.

`load` gives a model that answers; `stop` refuses new requests; `drain` waits for the accepted ones;
`close` frees everything.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelserver.backend import Backend, BackendContext, Placement
from modelserver.config.schema import ModelConfig
from modelserver.config.signature import ModelSignature
from modelserver.core.clock import Clock, SystemClock
from modelserver.core.request import InferRequest
from modelserver.core.stream import ResponseStream
from modelserver.errors import UnavailableError, UnsupportedError
from modelserver.execution.instances import InstanceFactory, LoadedInstance, close_all, guard
from modelserver.execution.placement import plan_instances
from modelserver.execution.worker import BatchRunner, DirectWorker, InlineWorker, Worker
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.direct import DirectScheduler
from modelserver.telemetry.statistics import ModelStatistics

logger = logging.getLogger(__name__)

# How long `close` waits for a batch that is being executed before it gives the instance up.
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """An instance as an operator sees it; a passive one never executes."""

    name: str
    placement: Placement
    is_busy: bool
    executions: int


@dataclass(frozen=True, slots=True)
class _StaffedInstance:
    """An instance and, unless it is passive, the worker that drives it."""

    loaded: LoadedInstance
    worker: Worker | InlineWorker | DirectWorker | None


class Model:
    """Made by `load`. The event loop thread submits, stops and drains; load-pool threads load, update and close.

    `_update_lock` lets one thread at a time change the instances. `_staffed` is replaced, never changed,
    so that any thread may read it.
    """

    def __init__(
        self,
        backend: Backend,
        factory: InstanceFactory,
        scheduler: Batcher | DirectScheduler,
        *,
        signature: ModelSignature,
        statistics: ModelStatistics,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
    ) -> None:
        context = backend.context
        self.name = context.model_name
        self.version = context.version
        self.config = context.config
        self.backend_name = context.config.backend
        self.signature = signature
        self.statistics = statistics
        self.load_duration_s = 0.0
        self._backend = backend
        self._factory = factory
        self._scheduler = scheduler
        self._loop = loop
        self._clock = clock
        self._staffed: tuple[_StaffedInstance, ...] = ()
        self._update_lock = threading.Lock()
        self._is_closed = False
        self._idle = asyncio.Event()
        statistics.pending = lambda: scheduler.queue_depth
        statistics.inflight = lambda: scheduler.inflight

    @classmethod
    def load(
        cls,
        backend_class: type[Backend],
        context: BackendContext,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock | None = None,
        default_max_queue_size: int = 0,
    ) -> Model:
        """Load, create and warm up; the model answers from here on. Blocking, called from a load-pool thread.

        Raises ServerError with the reason, after freeing what was made. `default_max_queue_size` bounds
        queues whose config does not (0: unbounded).
        """
        started_s = time.monotonic()
        clock = clock or SystemClock()
        config = context.config
        _check_supported(config)
        plans = plan_instances(config)
        what = f"model '{context.model_name}' version {context.version}"
        backend = guard(lambda: backend_class(context), f"loading {what} failed")
        guard(backend.load, f"loading {what} failed")
        try:
            signature = ModelSignature(config)
            factory = InstanceFactory(backend, signature, clock)
            instances = factory.create_all(plans)
            statistics = ModelStatistics()
            scheduler: Batcher | DirectScheduler
            if backend.runs_inline and config.dynamic_batching is None:
                scheduler = DirectScheduler(config.name, statistics=statistics, clock=clock)
            else:
                scheduler = Batcher(
                    config,
                    loop=loop,
                    statistics=statistics,
                    clock=clock,
                    can_join_ragged=all(instance.sees_requests for instance in instances),
                    default_max_queue_size=default_max_queue_size,
                )
            model = cls(backend, factory, scheduler, signature=signature, statistics=statistics, loop=loop, clock=clock)
        except BaseException:
            _unload(backend)
            raise
        model._staffed = model._staff(instances)
        model.load_duration_s = time.monotonic() - started_s
        logger.info("%s is loaded, %d instances, %.3f s", what, len(instances), model.load_duration_s)
        return model

    @property
    def inflight(self) -> int:
        """Requests that are queued or executing. Read on the event loop thread."""
        return self._scheduler.inflight

    @property
    def queue_depth(self) -> int:
        """Requests that no instance has taken yet."""
        return self._scheduler.queue_depth

    def submit(self, request: InferRequest) -> ResponseStream:
        """Accept a checked request, and answer it exactly once on its stream. Event loop thread.

        Raises UnavailableError (stopped, or queue full) or CancelledError: then the caller answers.
        """
        return self._scheduler.submit(request)

    def is_ready(self) -> bool:
        """Whether every instance can execute now."""
        return all(staffed.loaded.instance.is_ready() for staffed in self._staffed)

    def instances(self) -> list[InstanceInfo]:
        """The instances that serve now, in the order of the config."""
        infos = []
        for staffed in self._staffed:
            placement = staffed.loaded.plan.placement
            runner = staffed.worker.runner if staffed.worker is not None else None
            infos.append(
                InstanceInfo(
                    placement.name,
                    placement,
                    is_busy=runner is not None and runner.is_busy,
                    executions=runner.num_executions if runner is not None else 0,
                )
            )
        return infos

    def stop(self) -> None:
        """Refuse new requests and finish the accepted ones. Event loop thread; safe to repeat."""
        self._scheduler.stop()

    async def drain(self, timeout_s: float | None) -> bool:
        """Wait until every accepted request is answered; False when time is up first."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._scheduler.inflight:
                    self._idle.clear()
                    self._scheduler.on_idle = self._idle.set
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def update_instances(self, config: ModelConfig) -> None:
        """Follow a config that differs in `instance_group` only. Blocking, called from a load-pool thread.

        New instances are made before old ones go, and unchanged ones stay, so traffic goes on. Raises
        ServerError, with nothing changed, when an instance cannot be made.
        """
        with self._update_lock:
            if self._is_closed:
                raise UnavailableError(f"model '{self.name}' version {self.version} is unloaded")
            plans = plan_instances(config)
            current = {staffed.loaded.plan: staffed for staffed in self._staffed}
            old_context = self._backend.context
            self._backend.context = replace(old_context, config=config)
            try:
                made = self._factory.create_all([plan for plan in plans if plan not in current])
            except BaseException:
                self._backend.context = old_context
                raise
            added = {staffed.loaded.plan: staffed for staffed in self._staff(made)}
            self._staffed = tuple(current.get(plan) or added[plan] for plan in plans)
            self.config = config
            removed = [staffed for plan, staffed in current.items() if plan not in plans]
            self._dismiss(removed)
        logger.info(
            "model '%s' version %d: %d instances added, %d removed", self.name, self.version, len(added), len(removed)
        )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Free everything. Blocking, called from a load-pool thread; safe to repeat.

        Requests still queued get UNAVAILABLE. An instance that is still executing after `timeout_s` is
        abandoned, and with it the backend: they cannot be freed under its feet.
        """
        with self._update_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._scheduler.abort(UnavailableError(f"model '{self.name}' was unloaded before the request was executed"))
            if self._dismiss(self._staffed, timeout_s):
                _unload(self._backend)

    def _staff(self, instances: Sequence[LoadedInstance]) -> tuple[_StaffedInstance, ...]:
        """Give each instance a worker, and start it."""
        staffed = tuple(_StaffedInstance(loaded, self._make_worker(loaded)) for loaded in instances)
        for each in staffed:
            if each.worker is not None:
                each.worker.start()
        return staffed

    def _make_worker(self, loaded: LoadedInstance) -> Worker | InlineWorker | DirectWorker | None:
        if loaded.plan.is_passive:
            return None
        runner = BatchRunner(loaded.executor, self.statistics, self._clock)
        if isinstance(self._scheduler, DirectScheduler):
            return DirectWorker(self._scheduler, runner, self._loop)
        if self._backend.runs_inline:
            return InlineWorker(self._scheduler, runner, self._loop, self._clock)
        name = f"{self.name}/{self.version}/{loaded.name}"
        return Worker(name, self._scheduler, runner, lambda: self._may_take(loaded))

    def _may_take(self, loaded: LoadedInstance) -> bool:
        """Whether the instance is one to run the next batch: it can, or no other can either. From any thread."""
        if loaded.instance.can_execute():
            return True
        return not any(other.worker is not None and other.loaded.instance.can_execute() for other in self._staffed)

    def _dismiss(self, staffed: Sequence[_StaffedInstance], timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Let the workers end and close their instances; False when one did not end in time."""
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


def _check_supported(config: ModelConfig) -> None:
    """Raise UnsupportedError for what a config may ask and this server does not do, rather than serve it wrongly."""
    unsupported = {
        "sequence_batching": config.sequence_batching is not None,
        "ensemble_scheduling": config.is_ensemble,
        "batch_input": bool(config.batch_input),
        "batch_output": bool(config.batch_output),
    }
    for field, is_used in unsupported.items():
        if is_used:
            raise UnsupportedError(f"model '{config.name}': {field} is not supported by this server")


def _unload(backend: Backend) -> None:
    try:
        backend.unload()
    except Exception:
        logger.exception("unloading model '%s' version %d failed", backend.context.model_name, backend.context.version)
