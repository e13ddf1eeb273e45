"""Runs one batch on one instance: gather, execute, scatter, and every failure turned into an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from modelserver.backend import AnyInstance, BatchInstance, StepInstance, TensorInstance
from modelserver.core.clock import Clock
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import InternalError, ServerError
from modelserver.execution.assemble import Assembler
from modelserver.execution.interruption import Interruption
from modelserver.telemetry.statistics import BatchTiming

logger = logging.getLogger(__name__)


class Outcome(msgspec.Struct):
    """What became of a batch: one entry for each request, in order, and the times (ns) at which its phases ended.

    An entry is a response. Where the instance answers later, it is whatever `OpenResponse.settle` understands.
    `has_failed`: the batch failed as a whole, and there are no times.
    """

    entries: Sequence[Any]
    prepared_ns: int = 0
    called_ns: int = 0
    done_ns: int = 0
    has_failed: bool = False

    def timing(self, taken_ns: int) -> BatchTiming:
        """The durations of the phases of a batch that was taken from its queue at that time."""
        return BatchTiming(
            self.prepared_ns - taken_ns, self.called_ns - self.prepared_ns, self.done_ns - self.called_ns
        )


class Executor:
    """One instance with what it needs around it. Called from one thread at a time."""

    def __init__(self, instance: AnyInstance, assembler: Assembler, *, instance_name: str, clock: Clock) -> None:
        self.assembler = assembler
        self.answers_later = False
        # Whether `run_together` may be used.
        self.takes_several_batches = False
        self.now_ns = clock.now_ns
        self._instance_name = instance_name
        # None if the instance gets the requests as they are.
        self._prepare: Callable[[Sequence[InFlightRequest]], Any] | None = None
        self._call: Callable[[Any], Any]
        self._call_together: Callable[[Any], Sequence[Any]]
        self._finish: Callable[[Sequence[InFlightRequest], Any], Any] = assembler.collect
        # The instance, if it can be told to stop.
        self._interruptible: TensorInstance | None = None
        self._interruption: Interruption | None = None
        if assembler.shapes_inputs:
            self._prepare = assembler.shape_inputs
        if isinstance(instance, TensorInstance):
            self._prepare, self._call, self._finish = assembler.gather, instance.run, assembler.scatter
            self._interruptible = instance if instance.can_be_interrupted else None
        elif isinstance(instance, BatchInstance):
            self._call, self._call_together = instance.execute, instance.execute_batches
            self.answers_later, self.takes_several_batches = instance.answers_later, instance.takes_several_batches
        else:
            self._call, self.answers_later = partial(_step_to_end, instance), True
        if self.answers_later:
            self._finish = assembler.collect_later
        self.set_interruptible(True)

    def set_interruptible(self, is_wanted: bool) -> None:
        """Whether a batch is ended when all of its clients have left meanwhile, if the instance can be told to stop."""
        instance = self._interruptible
        self._interruption = Interruption(instance) if is_wanted and instance is not None else None

    def interrupt(self) -> None:
        """End the run in progress, if the instance can be told to stop. From any thread."""
        if self._interruptible is not None:
            self._interruptible.interrupt(True)

    def prepare(self, requests: Sequence[InFlightRequest]) -> Any:
        """What the instance gets for these requests. Raises ServerError."""
        return requests if self._prepare is None else self._prepare(requests)

    def run(self, requests: Sequence[InFlightRequest]) -> Outcome:
        """Execute a batch. Never raises: what an instance raises becomes the response of every request."""
        try:
            inputs: Any = requests if self._prepare is None else self._prepare(requests)
            prepared_ns = self.now_ns()
            outputs = self._call(inputs) if self._interruption is None else self._interruption.run(requests, inputs)
            called_ns = self.now_ns()
            return Outcome(self._finish(requests, outputs), prepared_ns, called_ns, self.now_ns())
        except (Exception, SystemExit) as error:  # a model that calls sys.exit() must not end a worker
            return self.failure(requests, error)

    def run_together(self, batches: Sequence[Sequence[InFlightRequest]]) -> list[Outcome]:
        """As `run`, for several batches that travel together; each is timed with its share of the whole."""
        try:
            prepared = [self.prepare(requests) for requests in batches]
            prepared_ns = self.now_ns()
            results = self._call_together(prepared)
        except (Exception, SystemExit) as error:
            return [self.failure(requests, error) for requests in batches]
        infer_ns = (self.now_ns() - prepared_ns) // len(batches)
        return [self.conclude(requests, result, infer_ns) for requests, result in zip(batches, results, strict=True)]

    def conclude(self, requests: Sequence[InFlightRequest], result: Any, infer_ns: int) -> Outcome:
        """The outcome of a batch that the instance has answered with `result`, perhaps an error, after `infer_ns`."""
        called_ns = self.now_ns()
        try:
            if isinstance(result, ServerError):
                raise result
            return Outcome(self._finish(requests, result), called_ns - infer_ns, called_ns, self.now_ns())
        except Exception as error:
            return self.failure(requests, error)

    def failure(self, requests: Sequence[InFlightRequest], error: BaseException) -> Outcome:
        """The outcome of a batch that failed as a whole. An error that is not the server's own is logged."""
        if not isinstance(error, ServerError):
            logger.error(
                "instance '%s' failed on a batch of %d requests", self._instance_name, len(requests), exc_info=error
            )
            error = InternalError(f"instance '{self._instance_name}' failed: {type(error).__name__}: {error}")
        return Outcome([InferResponse(error=error) for _ in requests], has_failed=True)


def _step_to_end(instance: StepInstance, requests: Sequence[InFlightRequest]) -> None:
    """Carry requests through on an instance that no worker drives yet: warmup."""
    for request in requests:
        instance.add(request)
    while instance.has_work:
        instance.step()
