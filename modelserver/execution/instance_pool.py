"""The instances of a model, the workers that drive them, and the scheduler that feeds these."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from modelserver.backend import Backend, ConfigError
from modelserver.config.instance_rules import InlineExecution, inline_execution
from modelserver.config.schema import ModelConfig
from modelserver.config.signature import ModelSignature
from modelserver.core.clock import Clock
from modelserver.execution.engine import Engine
from modelserver.execution.inline import INLINE_BUDGET_NS, InlineGuard, decide_inline
from modelserver.execution.instances import InstanceFactory, LoadedInstance, close_all
from modelserver.execution.placement import InstancePlan, plan_instances, reuse
from modelserver.execution.pooled_instances import PooledInstance, stop_instances
from modelserver.execution.runner import Runner
from modelserver.execution.shared_resources import ResourceClaims, SharedResources
from modelserver.execution.worker_factory import WorkerFactory
from modelserver.scheduling.batch import FormBatch, form_batch
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.direct import DirectScheduler
from modelserver.scheduling.hold import held_form, hold_from
from modelserver.scheduling.places import Places
from modelserver.scheduling.scheduler import Scheduler
from modelserver.scheduling.sequence_batcher import SequenceBatcher
from modelserver.scheduling.strategy import BatchStrategy
from modelserver.telemetry.measurement import Measurement
from modelserver.telemetry.statistics import ModelStatistics

logger = logging.getLogger(__name__)

# When to try again to take a slow model off the event loop while its instances are being changed.
_RETRY_S = 0.01


class InstancePool(Engine):
    """The engine of a model with instances. It takes requests once made.

    `is_inline`: the event loop executes them. Once false it stays false.
    """

    def __init__(
        self,
        backend: Backend,
        factory: InstanceFactory,
        plans: Sequence[InstancePlan],
        *,
        signature: ModelSignature,
        statistics: ModelStatistics,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        default_max_queue_size: int,
        resources: SharedResources,
    ) -> None:
        """Blocking. Raises ServerError, with nothing left behind, when an instance cannot be made."""
        super().__init__()
        self._backend = backend
        self._factory = factory
        self._signature = signature
        self._statistics = statistics
        self._loop = loop
        self._clock = clock
        self._default_max_queue_size = default_max_queue_size
        self._cores = resources.cores
        self._is_fair = resources.is_fair
        self._is_adaptive = resources.is_adaptive
        self._claims = ResourceClaims(resources.limiter, self._what)
        self._workers = WorkerFactory(
            backend, self._claims, resources.cores, statistics=statistics, loop=loop, clock=clock
        )
        self._is_stopped = False
        self._has_warned = False
        self._is_leaving = False
        self._guard = InlineGuard(self._on_slow)
        context = backend.context
        self._strategy = (
            BatchStrategy(context.batch_strategy, context.config) if context.batch_strategy is not None else None
        )
        instances, self.is_inline = self._make(plans)
        self._answers_later = any(instance.executor.answers_later for instance in instances)
        self._goes_in_steps = any(instance.goes_in_steps for instance in instances)
        self._use(self._make_scheduler())
        self._serve_with(self._start(instances))

    def measure(self) -> list[Sequence[Measurement]]:
        return [member.loaded.instance.measure() for member in self.members]

    def stop(self) -> None:
        """Refuse new requests. Event loop thread; safe to repeat."""
        self._is_stopped = True
        self.scheduler.stop()

    def update(self, config: ModelConfig) -> tuple[int, list[PooledInstance]]:
        """As `Engine.update`: new instances are made before old ones are closed.

        Those with an unchanged description stay under their old name, even if their group was renamed.
        """
        plans = plan_instances(config)
        old_context = self._backend.context
        self._backend.context = replace(old_context, config=config)
        try:
            return self._follow(plans)
        except BaseException:
            self._backend.context = old_context
            raise

    def _follow(self, plans: Sequence[InstancePlan]) -> tuple[int, list[PooledInstance]]:
        current = {member.loaded.plan: member for member in self.members}
        kept = reuse(plans, tuple(current))
        made, is_fast = self._make([plan for plan, old in zip(plans, kept, strict=True) if old is None])
        added = {member.loaded.plan: member for member in self._start(made)}
        self._serve_with(
            tuple(added[plan] if old is None else current[old] for plan, old in zip(plans, kept, strict=True))
        )
        if self.is_inline and not is_fast:
            with suppress(RuntimeError):  # the loop is closed: no instance executes any more
                self._loop.call_soon_threadsafe(self.leave_loop)
        return len(added), [member for plan, member in current.items() if plan not in kept]

    def close(self, timeout_s: float) -> bool:
        """Let the workers end and close their instances; False when one did not end in time. As `update`."""
        self._is_stopped = True
        has_ended = stop_instances(self.members, timeout_s) and self.draining.end(timeout_s)
        if has_ended:
            # Workers refer to their pool. Without this, memory and threads of a library would stay until the next
            # garbage collection.
            self._serve_with(())
            self._guard = InlineGuard(_do_nothing)
            self._statistics.pending = self._statistics.inflight = _nothing
            if self._strategy is not None:
                self._strategy.close()
        return has_ended

    def leave_loop(self) -> None:
        """Let worker threads execute from now on. Called from the event loop thread, between two executions.

        Queued requests stay queued, and executed ones are answered before. This waits while the instances are being
        changed.
        """
        if not self.lock.acquire(blocking=False):
            if not self._is_leaving:
                self._is_leaving = True
                self._loop.call_later(_RETRY_S, self._retry_leave)
            return
        try:
            if self._is_stopped or not self.is_inline:
                return
            self.is_inline = False
            former = self.members
            for member in former:
                if member.worker is not None:
                    member.worker.close()  # it is not executing, because this is the loop's thread
            if self.scheduler.runs_directly:
                self._use(self._make_scheduler())
            runners = [member.worker.runner if member.worker is not None else None for member in former]
            self._serve_with(self._start([member.loaded for member in former], runners))
        finally:
            self.lock.release()
        logger.warning(
            "%s is executed by worker threads from now on: it kept the event loop for more than the budget of %d us",
            self._what,
            INLINE_BUDGET_NS // 1000,
        )

    def _retry_leave(self) -> None:
        self._is_leaving = False
        self.leave_loop()

    @property
    def _what(self) -> str:
        context = self._backend.context
        return f"model '{context.model_name}' version {context.version}"

    def _make(self, plans: Sequence[InstancePlan]) -> tuple[list[LoadedInstance], bool]:
        """Create instances, and decide whether the event loop may execute them, before they get requests."""
        self._warn_of_policies(plans)
        claims = self._claims.join(plans)
        instances: list[LoadedInstance] = []
        try:
            instances = self._factory.create_all(plans)
            self._statistics.warmup_s = self._factory.warmup_s
            # An instance that waits for resources cannot run on the event loop.
            is_fast = not self._claims and decide_inline(self._backend, instances, self._signature)
            self._check_steps(instances, claims)
        except BaseException:
            close_all(instances)
            for plan, claim in claims.items():
                self._claims.leave(plan, claim)
            raise
        return instances, not instances or is_fast

    def _check_steps(self, instances: Sequence[LoadedInstance], claims: Collection[InstancePlan]) -> None:
        """Raise ConfigError for options that instances which work in steps do not support."""
        if not any(loaded.goes_in_steps for loaded in instances):
            return
        problem = None
        if self._backend.context.config.sequence_batching is not None:
            problem = "sequence_batching"
        elif claims:
            problem = "instance_group.rate_limiter.resources"
        if problem is not None:
            raise ConfigError(f"{self._what}: {problem}: not for a backend whose instances go in steps; remove it")

    def _warn_of_policies(self, plans: Sequence[InstancePlan]) -> None:
        for name in dict.fromkeys(plan.group.host_policy for plan in plans):
            if name and name not in self._cores.names:
                logger.warning(
                    "%s: there is no host policy '%s' (--host-policy gives %s): its instances run on any core",
                    self._what,
                    name,
                    ", ".join(self._cores.names) or "none",
                )

    def _make_scheduler(self) -> Scheduler:
        config = self._backend.context.config
        hold = hold_from(os.environ)
        if config.sequence_batching is not None:
            return SequenceBatcher(
                config,
                loop=self._loop,
                statistics=self._statistics,
                clock=self._clock,
                default_max_queue_size=self._default_max_queue_size,
                hold=hold,
                is_fair=self._is_fair,
                is_adaptive=self._is_adaptive,
            )
        if self.is_inline and config.dynamic_batching is None and not self._answers_later and hold is None:
            return DirectScheduler(config.name, statistics=self._statistics, clock=self._clock)
        form: FormBatch = form_batch if self._strategy is None else self._strategy.form
        return Batcher(
            config,
            loop=self._loop,
            statistics=self._statistics,
            clock=self._clock,
            default_max_queue_size=self._default_max_queue_size,
            form=form if hold is None else held_form(hold, form),
            places=Places(self._backend.prefix_inputs) if self._goes_in_steps and hold is None else None,
            is_fair=self._is_fair,
            is_adaptive=self._is_adaptive,
        )

    def _use(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._statistics.pending = lambda: scheduler.queue_depth
        self._statistics.inflight = lambda: scheduler.inflight

    def _serve_with(self, members: tuple[PooledInstance, ...]) -> None:
        self.members = members
        self._workers.peers.instances = [member.loaded for member in members if member.worker is not None]

    def _start(
        self, instances: Sequence[LoadedInstance], runners: Sequence[Runner | None] = ()
    ) -> tuple[PooledInstance, ...]:
        """Give each instance a worker, with its former runner if it had one, and start it."""
        members = []
        guard = self._guard if self.is_inline else None
        for loaded, runner in zip(instances, runners or [None] * len(instances), strict=True):
            if loaded.process is not None:
                loaded.process.count_restarts(self._statistics.process_restarts)
            worker = self._workers.make(loaded, runner, self.scheduler, guard)
            claim = self._claims.get(loaded.plan)
            members.append(PooledInstance(loaded, worker, partial(self._claims.leave, loaded.plan, claim)))
        for member in members:
            if member.worker is not None:
                member.worker.start()
        return tuple(members)

    def _on_slow(self) -> None:
        """Executions take too long for the event loop. Called from its thread."""
        if inline_execution(self._backend.context.config) is not InlineExecution.ALWAYS:
            self.leave_loop()
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s keeps the event loop for more than %d us at a time, as its config allows; "
                "everything else waits meanwhile",
                self._what,
                INLINE_BUDGET_NS // 1000,
            )


def _do_nothing() -> None:
    """The pool is closed."""


def _nothing() -> int:
    return 0
