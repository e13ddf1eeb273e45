"""Which worker and which runner drive an instance, by where it lives and how it answers."""

from __future__ import annotations

import asyncio
import logging

from modelserver.backend import Backend, Instance, StepInstance
from modelserver.core.clock import Clock
from modelserver.execution.host_policy import Cores, HostCores
from modelserver.execution.inline import InlineGuard
from modelserver.execution.instances import LoadedInstance
from modelserver.execution.process_worker import ProcessWorker
from modelserver.execution.response_dispatcher import ResponseDispatcher
from modelserver.execution.runner import Runner
from modelserver.execution.shared_resources import ResourceClaims
from modelserver.execution.step_runner import StepRunner
from modelserver.execution.workers import BatchThread, DirectWorker, InlineWorker, Peers, StepThread, Worker
from modelserver.scheduling.direct import DirectScheduler
from modelserver.scheduling.rate_limit import LimitedSource
from modelserver.scheduling.scheduler import BatchSource, Scheduler
from modelserver.scheduling.sequence import EndHook, SequenceEnd
from modelserver.telemetry.statistics import ModelStatistics

logger = logging.getLogger(__name__)


class WorkerFactory:
    """Makes the workers of one model. `peers` are the instances that serve now; the pool updates them."""

    def __init__(
        self,
        backend: Backend,
        claims: ResourceClaims,
        cores: HostCores,
        *,
        statistics: ModelStatistics,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
    ) -> None:
        self.peers = Peers()
        self._backend = backend
        self._claims = claims
        self._cores = cores
        self._statistics = statistics
        self._loop = loop
        self._clock = clock

    def make(
        self, loaded: LoadedInstance, runner: Runner | None, scheduler: Scheduler, guard: InlineGuard | None
    ) -> Worker | None:
        """A worker, with its former runner if it had one; None for a passive instance.

        With `guard` the instance is executed on the event loop.
        """
        if loaded.plan.is_passive:
            return None
        if loaded.steps is not None:
            return self._make_step_thread(loaded, loaded.steps, scheduler)
        if isinstance(scheduler, DirectScheduler):
            runner = runner or Runner(loaded.executor, self._statistics, self._clock)
            runner.guard = guard
            return DirectWorker(scheduler, runner, self._loop)
        source = self._source_of(loaded, scheduler)
        runner = runner or self._make_runner(loaded, source)
        runner.guard = guard
        if guard is not None:
            return InlineWorker(source, runner, self._clock, self._loop)
        if loaded.process is not None and loaded.process.loop is self._loop:
            return ProcessWorker(source, loaded.process, runner, self._clock, loaded=loaded, peers=self.peers)
        name, cores = self._thread_of(loaded)
        return BatchThread(name, source, runner, self._clock, loaded=loaded, peers=self.peers, cores=cores)

    def _source_of(self, loaded: LoadedInstance, scheduler: Scheduler) -> BatchSource:
        """The source of the worker's batches; with a resource claim, it gives some only while the claim is granted."""
        source = scheduler.source(_end_hook(loaded))
        claim = self._claims.get(loaded.plan)
        if claim is None or self._claims.limiter is None:
            return source
        return LimitedSource(source, self._claims.limiter, claim)

    def _thread_of(self, loaded: LoadedInstance) -> tuple[str, Cores | None]:
        """The name of the worker's thread, and the cores that it runs on."""
        context = self._backend.context
        cores = self._cores.cores_of(loaded.plan.group.host_policy, loaded.plan.placement)
        return f"{context.model_name}/{context.version}/{loaded.name}", cores

    def _make_step_thread(self, loaded: LoadedInstance, instance: StepInstance, scheduler: Scheduler) -> StepThread:
        source = scheduler.source()
        runner = StepRunner(
            loaded.executor,
            instance,
            self._make_dispatcher(loaded, source),
            name=loaded.name,
            statistics=self._statistics,
            clock=self._clock,
        )
        name, cores = self._thread_of(loaded)
        return StepThread(name, source, runner, self._clock, cores=cores)

    def _make_runner(self, loaded: LoadedInstance, source: BatchSource) -> Runner:
        dispatcher = self._make_dispatcher(loaded, source) if loaded.executor.answers_later else None
        return Runner(loaded.executor, self._statistics, self._clock, dispatcher)

    def _make_dispatcher(self, loaded: LoadedInstance, source: BatchSource) -> ResponseDispatcher:
        config = self._backend.context.config
        return ResponseDispatcher(
            source,
            loaded.executor.assembler.check_sent,
            model_name=config.name,
            is_decoupled=config.is_decoupled,
            statistics=self._statistics,
            clock=self._clock,
            is_stepped=loaded.goes_in_steps,
        )


def _end_hook(loaded: LoadedInstance) -> EndHook | None:
    """A function that tells an instance about ended sequences; None if it does not override `on_sequence_end`."""
    instance = loaded.instance
    if type(instance).on_sequence_end is Instance.on_sequence_end:
        return None

    def tell(sequence_id: int | str, end: SequenceEnd) -> None:
        try:
            instance.on_sequence_end(sequence_id, end.value)
        except Exception:
            logger.exception("instance '%s': on_sequence_end of sequence %s failed", loaded.name, sequence_id)

    return tell
