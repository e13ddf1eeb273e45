"""One loaded version of a model: its backend, its instances with their workers, its scheduler.

`load` gives a model that answers; `stop` refuses new requests; `drain` waits for the accepted ones;
`close` frees everything.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from modelserver.backend import Backend, BackendContext
from modelserver.config.inline_execution import InlineExecution, inline_execution
from modelserver.config.schema import ModelConfig
from modelserver.config.signature import ModelSignature
from modelserver.core.clock import Clock, SystemClock
from modelserver.core.request import InferRequest
from modelserver.core.stream import ResponseStream
from modelserver.errors import UnavailableError, UnsupportedError
from modelserver.execution.inline import decide_inline
from modelserver.execution.inline_guard import INLINE_BUDGET_NS, InlineGuard
from modelserver.execution.inline_worker import DirectWorker, InlineWorker
from modelserver.execution.instances import InstanceFactory, LoadedInstance, close_all, guard
from modelserver.execution.placement import plan_instances
from modelserver.execution.runner import BatchRunner
from modelserver.execution.staff import AnyWorker, InstanceInfo, StaffedInstance, dismiss
from modelserver.execution.worker import Worker
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.direct import DirectScheduler
from modelserver.telemetry.statistics import ModelStatistics

logger = logging.getLogger(__name__)

# How long `close` waits for a batch that is being executed before it gives the instance up.
CLOSE_TIMEOUT_S = 30.0


class Model:
    """Made by `load`. The event loop thread submits, stops and drains; load-pool threads load, update and close.

    `_update_lock` lets one thread at a time change the instances. `_staffed` is replaced, never changed,
    so that any thread may read it. `_is_inline` says where they are executed; once false it stays so.
    """

    def __init__(
        self,
        backend: Backend,
        factory: InstanceFactory,
        *,
        signature: ModelSignature,
        statistics: ModelStatistics,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        default_max_queue_size: int,
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
        self._loop = loop
        self._clock = clock
        self._default_max_queue_size = default_max_queue_size
        self._can_join_ragged = False
        self._is_inline = False
        self._has_warned = False
        self._scheduler: Batcher | DirectScheduler
        self._staffed: tuple[StaffedInstance, ...] = ()
        self._update_lock = threading.Lock()
        self._guard = InlineGuard(self._on_slow)
        self._is_stopped = False
        self._is_closed = False
        self._idle = asyncio.Event()

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
            model = cls(
                backend,
                factory,
                signature=signature,
                statistics=ModelStatistics(),
                loop=loop,
                clock=clock,
                default_max_queue_size=default_max_queue_size,
            )
            model._open(factory.create_all(plans))
        except BaseException:
            _unload(backend)
            raise
        model.load_duration_s = time.monotonic() - started_s
        logger.info("%s is loaded, %d instances, %.3f s", what, len(plans), model.load_duration_s)
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
        return [staffed.info() for staffed in self._staffed]

    def stop(self) -> None:
        """Refuse new requests and finish the accepted ones. Event loop thread; safe to repeat."""
        self._is_stopped = True
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
                # Measured, if at all, before anybody else calls them.
                stays_inline = self._is_inline and (not made or decide_inline(self._backend, made, self.signature))
            except BaseException:
                self._backend.context = old_context
                raise
            added = {staffed.loaded.plan: staffed for staffed in self._staff(made)}
            self._staffed = tuple(current.get(plan) or added[plan] for plan in plans)
            self.config = config
            removed = [staffed for plan, staffed in current.items() if plan not in plans]
            dismiss(removed, CLOSE_TIMEOUT_S)
        if not stays_inline:
            self._post(self._leave_loop)
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
            if dismiss(self._staffed, timeout_s):
                _unload(self._backend)

    # Who executes, and where.

    def _open(self, instances: Sequence[LoadedInstance]) -> None:
        """Take requests for new instances."""
        try:
            self._is_inline = decide_inline(self._backend, instances, self.signature)
        except BaseException:
            close_all(instances)
            raise
        self._can_join_ragged = all(instance.sees_requests for instance in instances)
        self._use(self._make_scheduler())
        self._staffed = self._staff(instances)

    def _make_scheduler(self) -> Batcher | DirectScheduler:
        if self._is_inline and self.config.dynamic_batching is None:
            return DirectScheduler(self.name, statistics=self.statistics, clock=self._clock)
        return Batcher(
            self.config,
            loop=self._loop,
            statistics=self.statistics,
            clock=self._clock,
            can_join_ragged=self._can_join_ragged,
            default_max_queue_size=self._default_max_queue_size,
        )

    def _use(self, scheduler: Batcher | DirectScheduler) -> None:
        self._scheduler = scheduler
        self.statistics.pending = lambda: scheduler.queue_depth
        self.statistics.inflight = lambda: scheduler.inflight

    def _staff(self, instances: Sequence[LoadedInstance]) -> tuple[StaffedInstance, ...]:
        """Give each instance a worker, and start it."""
        staffed = tuple(StaffedInstance(loaded, self._make_worker(loaded)) for loaded in instances)
        for each in staffed:
            if each.worker is not None:
                each.worker.start()
        return staffed

    def _make_worker(self, loaded: LoadedInstance, runner: BatchRunner | None = None) -> AnyWorker | None:
        if loaded.plan.is_passive:
            return None
        runner = runner or BatchRunner(loaded.executor, self.statistics, self._clock)
        runner.guard = self._guard if self._is_inline else None
        if isinstance(self._scheduler, DirectScheduler):
            return DirectWorker(self._scheduler, runner, self._loop)
        if self._is_inline:
            return InlineWorker(self._scheduler, runner, self._loop, self._clock)
        name = f"{self.name}/{self.version}/{loaded.name}"
        return Worker(name, self._scheduler, runner, lambda: self._may_take(loaded))

    def _may_take(self, loaded: LoadedInstance) -> bool:
        """Whether the instance is one to run the next batch: it can, or no other can either. From any thread."""
        return loaded.instance.can_execute() or not any(other.can_execute for other in self._staffed)

    def _on_slow(self) -> None:
        """Executions keep the event loop for too long. Called from its thread."""
        if inline_execution(self.config) is not InlineExecution.ALWAYS:
            self._leave_loop()
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "model '%s' version %d keeps the event loop for more than %d us at a time, as its config allows; "
                "everything else waits meanwhile",
                self.name,
                self.version,
                INLINE_BUDGET_NS // 1000,
            )

    def _leave_loop(self) -> None:
        """From here on worker threads execute. Called from the event loop thread, between two executions.

        What is queued stays queued, and what was executed is answered before. While the instances are being
        changed nothing happens: it will show again that they are too slow.
        """
        if not self._update_lock.acquire(blocking=False):
            return
        try:
            if self._is_closed or self._is_stopped or not self._is_inline:
                return
            self._is_inline = False
            staffed = self._staffed
            for each in staffed:
                if each.worker is not None:
                    each.worker.close()  # none is executing, because this is the loop's thread
            if isinstance(self._scheduler, DirectScheduler):
                self._use(self._make_scheduler())
            self._staffed = tuple(
                StaffedInstance(each.loaded, each.worker and self._make_worker(each.loaded, each.worker.runner))
                for each in staffed
            )
            for each in self._staffed:
                if each.worker is not None:
                    each.worker.start()
        finally:
            self._update_lock.release()
        logger.warning(
            "model '%s' version %d is executed by worker threads from now on: it kept the event loop for more than "
            "the budget of %d us",
            self.name,
            self.version,
            INLINE_BUDGET_NS // 1000,
        )

    def _post(self, callback: Callable[[], None]) -> None:
        """Call back on the event loop thread, if there is one still."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)


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
