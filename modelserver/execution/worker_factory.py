"""Who drives the instances of a model: a thread, the event loop, or a process's conversation, and from what source."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from modelserver.backend import Backend, Instance, StepInstance, TensorInstance
from modelserver.core.clock import Clock
from modelserver.execution.executor import Executor
from modelserver.execution.host_policy import Cores, HostCores
from modelserver.execution.hosted_worker import AnsweredExecutor, HostedElsewhere, HostedWorker
from modelserver.execution.inline_guard import InlineGuard
from modelserver.execution.inline_worker import DirectWorker, InlineWorker
from modelserver.execution.instances import LoadedInstance
from modelserver.execution.resource_claims import ResourceClaims
from modelserver.execution.runner import BatchRunner
from modelserver.execution.sending import Deliverer, SenderDesk
from modelserver.execution.sending_runner import SendingRunner
from modelserver.execution.sequence_runner import SequenceRunner
from modelserver.execution.staffed_instance import AnyWorker, StaffedInstance
from modelserver.execution.step_runner import StepRunner
from modelserver.execution.step_worker import StepWorker
from modelserver.execution.worker import Worker
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.direct import DirectScheduler
from modelserver.scheduling.limited_source import LimitedSource
from modelserver.scheduling.sequence import SequenceEnd
from modelserver.scheduling.sequence_batcher import SequenceBatcher
from modelserver.scheduling.sequence_table import EndHook
from modelserver.scheduling.source import BatchSource
from modelserver.telemetry.statistics import ModelStatistics

logger = logging.getLogger(__name__)

Scheduler = Batcher | DirectScheduler | SequenceBatcher
# Ends what a worker still waits for when its instance is to go.
GiveUp = Callable[[], None]


class WorkerFactory:
    """`members` are those that serve now: whoever changes them says so here."""

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
        self.members: Sequence[StaffedInstance] = ()
        self._backend = backend
        self._claims = claims
        self._cores = cores
        self._statistics = statistics
        self._loop = loop
        self._clock = clock

    def make(
        self, loaded: LoadedInstance, runner: BatchRunner | None, scheduler: Scheduler, guard: InlineGuard | None
    ) -> tuple[AnyWorker | None, GiveUp]:
        """A worker, with its former runner if it had one, and how to end what it waits for; none for a passive one.

        With `guard` it executes on the event loop.
        """
        if loaded.plan.is_passive:
            return None, _do_nothing
        if isinstance(loaded.instance, StepInstance):
            return self._make_step_worker(loaded, loaded.instance, scheduler)
        runner = runner or self._make_runner(loaded.executor, scheduler)
        runner.guard = guard
        if isinstance(scheduler, DirectScheduler):
            return DirectWorker(scheduler, runner, self._loop), _do_nothing
        source, give_up = self._source_of(loaded, scheduler)
        if guard is not None:
            return InlineWorker(source, runner, self._loop, self._clock), give_up
        if isinstance(loaded.instance, HostedElsewhere) and loaded.instance.loop is self._loop:
            return self._make_hosted_worker(loaded, loaded.instance, source, scheduler), give_up
        if isinstance(loaded.instance, TensorInstance) and loaded.instance.can_be_interrupted:
            give_up = partial(_interrupt_too, loaded.instance, give_up)
        name, cores = self._thread_of(loaded)
        return Worker(name, source, runner, lambda: self._may_take(loaded), cores=cores), give_up

    def _source_of(self, loaded: LoadedInstance, scheduler: Batcher | SequenceBatcher) -> tuple[BatchSource, GiveUp]:
        """Where the worker takes its batches from, and how to end the sequences that it waits for."""
        source: BatchSource
        give_up: GiveUp = _do_nothing
        if isinstance(scheduler, Batcher):
            source = scheduler
        else:
            source = part = scheduler.add_instance(_end_hook(loaded))
            give_up = partial(scheduler.give_up, part)
        claim = self._claims.get(loaded.plan)
        if claim is not None and self._claims.limiter is not None:
            source = LimitedSource(source, self._claims.limiter, claim, self._clock)
        return source, give_up

    def _thread_of(self, loaded: LoadedInstance) -> tuple[str, Cores | None]:
        """Name of the worker's thread, and the cores that it runs on."""
        context = self._backend.context
        cores = self._cores.cores_of(loaded.plan.group.host_policy, loaded.plan.placement)
        return f"{context.model_name}/{context.version}/{loaded.name}", cores

    def _make_step_worker(
        self, loaded: LoadedInstance, instance: StepInstance, scheduler: Scheduler
    ) -> tuple[StepWorker, GiveUp]:
        assert isinstance(scheduler, Batcher), "instances that go in steps have neither sequences nor turns"
        runner = StepRunner(
            loaded.executor,
            instance,
            self._make_desk(loaded.executor, scheduler, is_stepped=True),
            name=loaded.name,
            statistics=self._statistics,
            clock=self._clock,
        )
        name, cores = self._thread_of(loaded)
        worker = StepWorker(name, scheduler, runner, self._clock, cores=cores)
        return worker, worker.give_up

    def _make_hosted_worker(
        self, loaded: LoadedInstance, instance: HostedElsewhere, source: BatchSource, scheduler: Scheduler
    ) -> HostedWorker:
        executor = AnsweredExecutor(
            loaded.instance, loaded.executor.assembler, instance_name=loaded.name, clock=self._clock
        )
        return HostedWorker(
            source,
            instance,
            executor,
            self._make_runner(executor, scheduler, is_stepped=instance.is_stepped),
            self._clock,
            may_take=lambda: self._may_take(loaded),
            sends_ahead=lambda: len(self.members) == 1 and isinstance(source, Batcher),
        )

    def _make_runner(self, executor: Executor, scheduler: Scheduler, *, is_stepped: bool = False) -> BatchRunner:
        if not executor.answers_later:
            if isinstance(scheduler, SequenceBatcher):
                return SequenceRunner(executor, self._statistics, self._clock)
            return BatchRunner(executor, self._statistics, self._clock)
        assert not isinstance(scheduler, DirectScheduler), "such an instance was not there when the scheduler was made"
        desk = self._make_desk(executor, scheduler, is_stepped=is_stepped)
        return SendingRunner(executor, self._statistics, self._clock, desk)

    def _make_desk(self, executor: Executor, scheduler: Deliverer, *, is_stepped: bool = False) -> SenderDesk:
        config = self._backend.context.config
        return SenderDesk(
            scheduler,
            executor.assembler.check_sent,
            model_name=config.name,
            is_decoupled=config.is_decoupled,
            statistics=self._statistics,
            clock=self._clock,
            is_stepped=is_stepped,
        )

    def _may_take(self, loaded: LoadedInstance) -> bool:
        """Whether the instance is one to run the next batch: it can, or no other can either. From any thread."""
        return loaded.instance.can_execute() or not any(other.can_execute for other in self.members)


def _do_nothing() -> None:
    """For instances without sequences."""


def _interrupt_too(instance: TensorInstance, give_up: Callable[[], None]) -> None:
    """End the run in progress, which has been waited for long enough."""
    give_up()
    instance.interrupt(True)


def _end_hook(loaded: LoadedInstance) -> EndHook | None:
    """How to tell an instance of sequences that ended; None if it does not want to know."""
    instance = loaded.instance
    if type(instance).on_sequence_end is Instance.on_sequence_end:
        return None

    def tell(sequence_id: int | str, end: SequenceEnd) -> None:
        try:
            instance.on_sequence_end(sequence_id, end.value)
        except Exception:
            logger.exception("instance '%s': on_sequence_end of sequence %s failed", loaded.name, sequence_id)

    return tell
