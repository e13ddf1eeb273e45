"""Runs one batch on one instance: gather, execute, scatter, and every failure turned into an answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from modelserver.backend import AnyInstance, Array, BatchInstance, StepInstance, TensorInstance
from modelserver.core.clock import Clock
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import CancelledError, InternalError, ServerError
from modelserver.execution.assemble import Assembler
from modelserver.platform.device_loss import note_device_error
from modelserver.telemetry.statistics import BatchTiming


class Interruption:
    """Interrupts an instance when all requests of its batch are cancelled. Executor's thread, except `_note`.

    While a batch is executed, cancels of its requests are reported here, and from here to their former callback.
    """

    def __init__(self, instance: TensorInstance, call: Callable[[Any], Any]) -> None:
        """`call` runs the instance."""
        self._instance = instance
        self._call = call
        self._lock = threading.Lock()  # guards the attributes below
        # Requests of the batch in progress that are not cancelled; None: no batch is in progress.
        self._waiting: set[InFlightRequest] | None = None
        self._is_interrupted = False
        self._inner: Callable[[InFlightRequest], None] | None = None

    def run(self, requests: Sequence[InFlightRequest], inputs: Any) -> Any:
        """`call`. Raises CancelledError when every request is cancelled before it is done."""
        own = [request for request in requests if not request.is_padding]
        inner = own[0].on_cancel if own else None
        try:
            self._begin(own, inner)
            return self._call(inputs)
        finally:
            self._end(own, inner)

    def _begin(self, own: Sequence[InFlightRequest], inner: Callable[[InFlightRequest], None] | None) -> None:
        with self._lock:
            self._waiting = set(own)
            self._inner = inner
        note = self._note  # one bound method, not one per request
        for request in own:
            request.on_cancel = note
        # Requests that were cancelled before had left the queue, so their former callback did nothing.
        gone = [request for request in own if request.is_cancelled]
        with self._lock:
            self._waiting.difference_update(gone)
            if own and not self._waiting:
                self._waiting = None
                raise CancelledError("the requests of the batch were cancelled before it was executed")

    def _end(self, own: Sequence[InFlightRequest], inner: Callable[[InFlightRequest], None] | None) -> None:
        for request in own:
            request.on_cancel = inner
        with self._lock:
            self._waiting = None
            if self._is_interrupted:
                self._is_interrupted = False
                self._instance.interrupt(False)

    def _note(self, request: InFlightRequest) -> None:
        """`InFlightRequest.on_cancel`. Called from the event loop thread."""
        with self._lock:
            inner = self._inner
            if self._waiting is not None and request in self._waiting:
                self._waiting.remove(request)
                if not self._waiting:
                    self._is_interrupted = True
                    self._instance.interrupt(True)
        if inner is not None:
            inner(request)


logger = logging.getLogger(__name__)


def _gather_on_device(
    assembler: Assembler, requests: Sequence[InFlightRequest]
) -> tuple[Mapping[str, Array], Mapping[str, Any]]:
    """What `TensorInstance.run_on_device` takes. The rows of several requests are split on the host."""
    return assembler.gather(requests), (requests[0].targets if len(requests) == 1 else None) or {}


class Outcome(msgspec.Struct):
    """The result of a batch: one entry for each request, in order, and the times (ns) at which its phases ended.

    An entry is a response. If the instance answers later, it is what `OpenResponse.settle` accepts.
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
    """Runs batches on one instance. Called from one thread at a time."""

    def __init__(self, instance: AnyInstance, assembler: Assembler, *, instance_name: str, clock: Clock) -> None:
        self.assembler = assembler
        self.answers_later = False
        # Whether `run_together` may be used.
        self.takes_several_batches = False
        self.now_ns = clock.now_ns
        self._instance_name = instance_name
        # None if the instance gets the requests unchanged.
        self._prepare: Callable[[Sequence[InFlightRequest]], Any] | None = None
        self._call: Callable[[Any], Any]
        self._call_together: Callable[[Any], Sequence[Any]]
        self._finish: Callable[[Sequence[InFlightRequest], Any], Any] = assembler.collect
        # The instance, if it can be interrupted.
        self._interruptible: TensorInstance | None = None
        self._interruption: Interruption | None = None
        if assembler.shapes_inputs:
            self._prepare = assembler.shape_inputs
        if isinstance(instance, TensorInstance):
            self._prepare, self._call, self._finish = assembler.gather, instance.run, assembler.scatter
            if instance.gpu is not None:
                self._prepare = partial(_gather_on_device, assembler)
                self._call = lambda prepared: instance.run_on_device(*prepared)
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
        """Whether a batch is interrupted when all of its clients have left, if the instance supports that."""
        instance = self._interruptible
        self._interruption = Interruption(instance, self._call) if is_wanted and instance is not None else None

    def interrupt(self) -> None:
        """Interrupt the run in progress, if the instance supports that. From any thread."""
        if self._interruptible is not None:
            self._interruptible.interrupt(True)

    def prepare(self, requests: Sequence[InFlightRequest]) -> Any:
        """The input of the instance for these requests. Raises ServerError."""
        return requests if self._prepare is None else self._prepare(requests)

    def run(self, requests: Sequence[InFlightRequest]) -> Outcome:
        """Execute a batch. Never raises: an exception of the instance becomes the response of every request."""
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
            note_device_error(error)
            error = InternalError(f"instance '{self._instance_name}' failed: {type(error).__name__}: {error}")
        return Outcome([InferResponse(error=error) for _ in requests], has_failed=True)


def _step_to_end(instance: StepInstance, requests: Sequence[InFlightRequest]) -> None:
    """Execute requests to their end on an instance that has no worker yet: warmup."""
    for request in requests:
        instance.add(request)
    while instance.has_work:
        instance.step()
