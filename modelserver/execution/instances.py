"""The instances of one loaded version: created and warmed up in parallel, each closed once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from modelserver.backend import AnyInstance, Backend, StepInstance
from modelserver.config.signature import ModelSignature
from modelserver.core.clock import Clock
from modelserver.errors import InternalError, ServerError
from modelserver.execution.assemble import Assembler
from modelserver.execution.batch_tensors import BatchTensors
from modelserver.execution.executor import Executor
from modelserver.execution.host_policy import HostCores, on_cores
from modelserver.execution.placement import InstancePlan
from modelserver.execution.process.instance import ProcessInstance
from modelserver.execution.sequence_inputs import SequenceInputs
from modelserver.execution.warmup import warm_up

logger = logging.getLogger(__name__)

# At most this many instances are created at once.
_MAX_CREATING = 8

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class LoadedInstance:
    """A warm instance, and its executor.

    `steps` is the instance if it goes in steps here, and `process` if it lives in a child process.
    """

    plan: InstancePlan
    instance: AnyInstance
    executor: Executor
    steps: StepInstance | None = None
    process: ProcessInstance | None = None

    @property
    def goes_in_steps(self) -> bool:
        """Whether it works in steps, here or in its process."""
        return self.steps is not None or (self.process is not None and self.process.is_stepped)

    @property
    def name(self) -> str:
        return self.plan.placement.name

    def close(self) -> None:
        """Free the instance. A failure is only logged, because callers could not handle it."""
        try:
            self.instance.close()
        except Exception:
            logger.exception("closing instance '%s' failed", self.name)


class InstanceFactory:
    """Makes the instances of one backend object. Called off the event loop."""

    def __init__(
        self, backend: Backend, signature: ModelSignature, clock: Clock, cores: HostCores | None = None
    ) -> None:
        # The longest warmup of an instance, in seconds.
        self.warmup_s = 0.0
        self._cores = cores or HostCores()
        self._backend = backend
        self._signature = signature
        context = backend.context
        has_sequences = context.config.sequence_batching is not None
        self._assembler = Assembler(
            signature,
            sequence=SequenceInputs(context.config, context.model_directory) if has_sequences else None,
            batch_tensors=BatchTensors(context.config),
        )
        self._clock = clock

    def create_all(self, plans: Sequence[InstancePlan]) -> list[LoadedInstance]:
        """One warm instance for each plan, in order. When one fails, all are closed and its ServerError is raised."""
        if len(plans) <= 1:
            return [self._create(plan) for plan in plans]
        loaded: list[LoadedInstance] = []
        failures: list[BaseException] = []
        with ThreadPoolExecutor(min(len(plans), _MAX_CREATING), thread_name_prefix="create-instance") as pool:
            for future in [pool.submit(self._create, plan) for plan in plans]:
                failure = future.exception()
                if failure is None:
                    loaded.append(future.result())
                else:
                    failures.append(failure)
        if failures:
            close_all(loaded)
            raise failures[0]
        return loaded

    def _create(self, plan: InstancePlan) -> LoadedInstance:
        # Threads and child processes that the instance starts stay on the cores that it is made on.
        with on_cores(self._cores.cores_of(plan.group.host_policy, plan.placement)):
            return self._create_here(plan)

    def _create_here(self, plan: InstancePlan) -> LoadedInstance:
        name = plan.placement.name
        context = self._backend.context
        instance = guard(lambda: self._backend.create_instance(plan.placement), f"creating instance '{name}' failed")
        executor = Executor(instance, self._assembler, instance_name=name, clock=self._clock)
        loaded = LoadedInstance(
            plan,
            instance,
            executor,
            steps=instance if isinstance(instance, StepInstance) else None,
            process=instance if isinstance(instance, ProcessInstance) else None,
        )
        try:
            began_s = time.monotonic()
            warm_up(executor, context.config, self._signature, context.model_directory, instance_name=name)
            self.warmup_s = max(self.warmup_s, time.monotonic() - began_s)
        except BaseException:
            loaded.close()
            raise
        return loaded


def close_all(instances: Iterable[LoadedInstance]) -> None:
    for instance in instances:
        instance.close()


def guard(call: Callable[[], _Result], failure: str) -> _Result:
    """Call into a backend: its ServerErrors pass, anything else becomes an InternalError that begins with `failure`."""
    try:
        return call()
    except ServerError:
        raise
    except (Exception, SystemExit) as error:
        logger.exception("%s", failure)
        raise InternalError(f"{failure}: {type(error).__name__}: {error}") from error
