"""The instances of a model, the workers that drive them, and the scheduler that feeds these."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from modelserver.backend import Backend, ConfigError, Instance, StepInstance, TensorInstance
from modelserver.config.inline_execution import InlineExecution, inline_execution
from modelserver.config.signature import ModelSignature
from modelserver.core.clock import Clock
from modelserver.execution.executor import Executor
from modelserver.execution.facilities import Facilities
from modelserver.execution.host_policy import Cores
from modelserver.execution.hosted_worker import AnsweredExecutor, HostedElsewhere, HostedWorker
from modelserver.execution.inline import decide_inline
from modelserver.execution.inline_guard import INLINE_BUDGET_NS, InlineGuard
from modelserver.execution.inline_worker import DirectWorker, InlineWorker
from modelserver.execution.instances import InstanceFactory, LoadedInstance, close_all
from modelserver.execution.placement import InstancePlan
from modelserver.execution.runner import BatchRunner
from modelserver.execution.sending import Deliverer, SenderDesk
from modelserver.execution.sending_runner import SendingRunner
from modelserver.execution.sequence_runner import SequenceRunner
from modelserver.execution.staffed_instance import AnyWorker, StaffedInstance, dismiss
from modelserver.execution.step_runner import StepRunner
from modelserver.execution.step_worker import StepWorker
from modelserver.execution.worker import Worker
from modelserver.scheduling.batch import FormBatch, form_batch
from modelserver.scheduling.batcher import Batcher
from modelserver.scheduling.direct import DirectScheduler
from modelserver.scheduling.hold import held_form, hold_from
from modelserver.scheduling.limited_source import LimitedSource
from modelserver.scheduling.rate_limit import Claim
from modelserver.scheduling.sequence import SequenceEnd
from modelserver.scheduling.sequence_batcher import SequenceBatcher
from modelserver.scheduling.sequence_table import EndHook
from modelserver.scheduling.source import BatchSource
from modelserver.scheduling.strategy import BatchStrategy
from modelserver.telemetry.measurement import Measurement
from modelserver.telemetry.statistics import ModelStatistics

logger = logging.getLogger(__name__)

# How long a model that is too slow for the event loop stays there while its instances are being changed.
_RETRY_S = 0.01

Scheduler = Batcher | DirectScheduler | SequenceBatcher


class Staff:
    """Made with its first instances, and then taking requests through `scheduler`.

    `lock` lets one thread at a time change the instances: whoever calls `update` or `close` holds it. `members` is
    replaced, never changed, so that any thread may read it. `is_inline` says where they are executed; once false
    it stays so.
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
        facilities: Facilities,
    ) -> None:
        """Blocking. Raises ServerError, with nothing left behind, when an instance cannot be made."""
        self.lock = threading.Lock()
        self._backend = backend
        self._factory = factory
        self._signature = signature
        self._statistics = statistics
        self._loop = loop
        self._clock = clock
        self._default_max_queue_size = default_max_queue_size
        self._limiter = facilities.limiter
        self._cores = facilities.cores
        self._is_fair = facilities.is_fair
        self._is_adaptive = facilities.is_adaptive
        # Of the instances that need resources, while there is a limiter.
        self._claims: dict[InstancePlan, Claim] = {}
        self._is_stopped = False
        self._has_warned = False
        self._is_leaving = False
        self._give_ups: dict[InstancePlan, Callable[[], None]] = {}
        self._guard = InlineGuard(self._on_slow)
        context = backend.context
        self._strategy = (
            BatchStrategy(context.batch_strategy, context.config) if context.batch_strategy is not None else None
        )
        instances, self.is_inline = self._make(plans)
        self._answers_later = any(instance.executor.answers_later for instance in instances)
        self.scheduler: Scheduler
        self._use(self._make_scheduler())
        self.members = self._employ(instances)

    def measure(self) -> list[Sequence[Measurement]]:
        """What each instance says of itself for the metrics page, in the order of the config. Event loop thread."""
        return [member.loaded.instance.measure() for member in self.members]

    def stop(self) -> None:
        """Refuse new requests. Event loop thread; safe to repeat."""
        self._is_stopped = True
        self.scheduler.stop()

    def update(self, plans: Sequence[InstancePlan]) -> tuple[int, list[StaffedInstance]]:
        """Follow other plans; how many instances were added, and those that are to be dismissed now. Blocking.

        New instances are made before old ones go, and unchanged ones stay. Raises ServerError, with nothing
        changed, when an instance cannot be made.
        """
        current = {member.loaded.plan: member for member in self.members}
        made, is_fast = self._make([plan for plan in plans if plan not in current])
        added = {member.loaded.plan: member for member in self._employ(made)}
        self.members = tuple(current.get(plan) or added[plan] for plan in plans)
        if self.is_inline and not is_fast:
            with suppress(RuntimeError):  # the loop is closed: nobody executes any more
                self._loop.call_soon_threadsafe(self.leave_loop)
        return len(added), [member for plan, member in current.items() if plan not in plans]

    def close(self, timeout_s: float) -> bool:
        """Let the workers end and close their instances; False when one did not end in time. As `update`."""
        self._is_stopped = True
        has_ended = dismiss(self.members, timeout_s)
        if has_ended:
            # Workers know their staff: without this, what a library keeps outside of Python's memory, threads among
            # it, would stay until the garbage collector comes by.
            self.members = ()
            self._guard = InlineGuard(_do_nothing)
            self._statistics.pending = self._statistics.inflight = _nothing
            if self._strategy is not None:
                self._strategy.close()
        return has_ended

    def leave_loop(self) -> None:
        """From here on worker threads execute. Called from the event loop thread, between two executions.

        What is queued stays queued, and what was executed is answered before. While the instances are being
        changed this has to wait.
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
            if isinstance(self.scheduler, DirectScheduler):
                self._use(self._make_scheduler())
            runners = [member.worker.runner if member.worker is not None else None for member in former]
            self.members = self._employ([member.loaded for member in former], runners)
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
        """New instances, and whether they may be executed on the event loop: found out before others call them."""
        self._warn_of_policies(plans)
        claims = self._join(plans)
        instances: list[LoadedInstance] = []
        try:
            instances = self._factory.create_all(plans)
            self._statistics.warmup_s = self._factory.warmup_s
            # What has to wait for resources can keep the event loop no company.
            is_fast = not self._claims and decide_inline(self._backend, instances, self._signature)
            self._check_steps(instances, claims)
        except BaseException:
            close_all(instances)
            for plan in claims:
                self._leave(plan)
            raise
        return instances, not instances or is_fast

    def _check_steps(self, instances: Sequence[LoadedInstance], claims: Collection[InstancePlan]) -> None:
        """Raise ConfigError for what instances that go in steps cannot do: they hold many requests at all times."""
        if not any(map(_goes_in_steps, instances)):
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

    def _join(self, plans: Sequence[InstancePlan]) -> dict[InstancePlan, Claim]:
        """Claims of the instances that need resources. Raises ConfigError, with nothing claimed, for one in vain."""
        claims: dict[InstancePlan, Claim] = {}
        limiter = self._limiter
        for plan in plans:
            wish = plan.group.rate_limiter
            if wish is None or not wish.resources or plan.is_passive:
                continue
            if limiter is None:
                logger.info(
                    "%s: instance '%s' has a rate_limiter, which counts only with --rate-limit=execution_count",
                    self._what,
                    plan.placement.name,
                )
                continue
            try:
                claims[plan] = limiter.join(plan.placement.name, plan.placement.device_id, wish)
            except BaseException:
                for claim in claims.values():
                    limiter.leave(claim)
                raise
        self._claims.update(claims)
        return claims

    def _leave(self, plan: InstancePlan) -> None:
        claim = self._claims.pop(plan, None)
        if claim is not None and self._limiter is not None:
            self._limiter.leave(claim)

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
            is_fair=self._is_fair,
            is_adaptive=self._is_adaptive,
        )

    def _use(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._statistics.pending = lambda: scheduler.queue_depth
        self._statistics.inflight = lambda: scheduler.inflight

    def _employ(
        self, instances: Sequence[LoadedInstance], runners: Sequence[BatchRunner | None] = ()
    ) -> tuple[StaffedInstance, ...]:
        """Give each instance a worker, with its former runner if it had one, and start it."""
        members = tuple(
            StaffedInstance(
                loaded,
                self._make_worker(loaded, runner),
                partial(self._leave, loaded.plan),
                self._give_ups.pop(loaded.plan, _do_nothing),
            )
            for loaded, runner in zip(instances, runners or [None] * len(instances), strict=True)
        )
        for member in members:
            if member.worker is not None:
                member.worker.start()
        return members

    def _make_worker(self, loaded: LoadedInstance, runner: BatchRunner | None) -> AnyWorker | None:
        if loaded.plan.is_passive:
            return None
        if isinstance(loaded.instance, StepInstance):
            return self._make_step_worker(loaded, loaded.instance)
        runner = runner or self._make_runner(loaded.executor)
        runner.guard = self._guard if self.is_inline else None
        if isinstance(self.scheduler, DirectScheduler):
            return DirectWorker(self.scheduler, runner, self._loop)
        source: BatchSource
        if isinstance(self.scheduler, SequenceBatcher):
            source = part = self.scheduler.add_instance(_end_hook(loaded))
            self._give_ups[loaded.plan] = partial(self.scheduler.give_up, part)
        else:
            source = self.scheduler
        claim = self._claims.get(loaded.plan)
        if claim is not None and self._limiter is not None:
            source = LimitedSource(source, self._limiter, claim, self._clock)
        if self.is_inline:
            return InlineWorker(source, runner, self._loop, self._clock)
        if isinstance(loaded.instance, HostedElsewhere) and loaded.instance.loop is self._loop:
            return self._make_hosted_worker(loaded, loaded.instance, source)
        if isinstance(loaded.instance, TensorInstance) and loaded.instance.can_be_interrupted:
            self._give_ups[loaded.plan] = partial(
                _interrupt_too, loaded.instance, self._give_ups.get(loaded.plan, _do_nothing)
            )
        name, cores = self._thread_of(loaded)
        return Worker(name, source, runner, lambda: self._may_take(loaded), cores=cores)

    def _thread_of(self, loaded: LoadedInstance) -> tuple[str, Cores | None]:
        """Name of the worker's thread, and the cores that it runs on."""
        context = self._backend.context
        cores = self._cores.cores_of(loaded.plan.group.host_policy, loaded.plan.placement)
        return f"{context.model_name}/{context.version}/{loaded.name}", cores

    def _make_step_worker(self, loaded: LoadedInstance, instance: StepInstance) -> StepWorker:
        assert isinstance(self.scheduler, Batcher), "instances that go in steps have neither sequences nor turns"
        runner = StepRunner(
            loaded.executor,
            instance,
            self._make_desk(loaded.executor, self.scheduler, is_stepped=True),
            name=loaded.name,
            statistics=self._statistics,
            clock=self._clock,
        )
        name, cores = self._thread_of(loaded)
        worker = StepWorker(name, self.scheduler, runner, self._clock, cores=cores)
        self._give_ups[loaded.plan] = worker.give_up
        return worker

    def _make_hosted_worker(
        self, loaded: LoadedInstance, instance: HostedElsewhere, source: BatchSource
    ) -> HostedWorker:
        executor = AnsweredExecutor(
            loaded.instance, loaded.executor.assembler, instance_name=loaded.name, clock=self._clock
        )
        return HostedWorker(
            source,
            instance,
            executor,
            self._make_runner(executor, is_stepped=instance.is_stepped),
            self._clock,
            may_take=lambda: self._may_take(loaded),
            sends_ahead=lambda: len(self.members) == 1 and isinstance(source, Batcher),
        )

    def _make_runner(self, executor: Executor, *, is_stepped: bool = False) -> BatchRunner:
        if not executor.answers_later:
            if isinstance(self.scheduler, SequenceBatcher):
                return SequenceRunner(executor, self._statistics, self._clock)
            return BatchRunner(executor, self._statistics, self._clock)
        scheduler = self.scheduler
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

    def _on_slow(self) -> None:
        """Executions keep the event loop for too long. Called from its thread."""
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
    """For instances without sequences, and when nobody is there any more."""


def _nothing() -> int:
    return 0


def _interrupt_too(instance: TensorInstance, give_up: Callable[[], None]) -> None:
    """End the run in progress, which has been waited for long enough."""
    give_up()
    instance.interrupt(True)


def _goes_in_steps(loaded: LoadedInstance) -> bool:
    instance = loaded.instance
    return isinstance(instance, StepInstance) or (isinstance(instance, HostedElsewhere) and instance.is_stepped)


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
