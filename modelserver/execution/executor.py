"""Runs one batch on one instance: gather, execute, scatter, and every failure turned into an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from modelserver.backend import AnyInstance, BatchInstance, StepInstance, TensorInstance
from modelserver.core.clock import Clock
from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.errors import InternalError, ServerError
from modelserver.execution.assemble import Assembler
from modelserver.execution.interruption import Interruption
from modelserver.telemetry.statistics import BatchTiming

logger = logging.getLogger(__name__)


class Executor:
    """One instance with what it needs around it. Called from one thread at a time."""

    def __init__(self, instance: AnyInstance, assembler: Assembler, *, instance_name: str, clock: Clock) -> None:
        self.instance = instance
        self.assembler = assembler
        self.answers_later = isinstance(instance, StepInstance) or (
            isinstance(instance, BatchInstance) and instance.answers_later
        )
        self._instance_name = instance_name
        self.now_ns = clock.now_ns
        self._prepare: Callable[[Sequence[InferRequest]], Any]
        self._call: Callable[[Any], Any]
        self._finish: Callable[[Sequence[InferRequest], Any], Any]
        # There for instances that can be told to stop.
        self._interruption: Interruption | None = None
        self.set_interruptible(True)
        if isinstance(instance, TensorInstance):
            self._prepare, self._call, self._finish = assembler.gather, instance.run, assembler.scatter
        elif isinstance(instance, StepInstance):
            self._prepare, self._call = assembler.shape_inputs, partial(_step_to_end, instance)
        else:
            self._prepare, self._call, self._finish = assembler.shape_inputs, instance.execute, assembler.collect
        if self.answers_later:
            # Then `responses` below are entries that `Line.settle` understands.
            self._finish = assembler.collect_later

    def set_interruptible(self, is_wanted: bool) -> None:
        """Whether a batch is ended when all of its clients have left meanwhile, if the instance can be told to stop."""
        instance = self.instance
        if is_wanted and isinstance(instance, TensorInstance) and instance.can_be_interrupted:
            self._interruption = Interruption(instance)
        else:
            self._interruption = None

    def execute(
        self, requests: Sequence[InferRequest], start_ns: int
    ) -> tuple[list[InferResponse], BatchTiming | None]:
        """One response for each request, in order, and the timing; None when the batch failed as a whole.

        Never raises: what an instance raises becomes the response of every request of the batch.
        """
        try:
            inputs = self._prepare(requests)
            prepared_ns = self.now_ns()
            outputs = self._call(inputs) if self._interruption is None else self._interruption.run(requests, inputs)
            called_ns = self.now_ns()
            responses = self._finish(requests, outputs)
        except ServerError as error:
            return [InferResponse(error=error) for _ in requests], None
        except (Exception, SystemExit) as error:  # a model that calls sys.exit() must not end a worker
            return self._failed(error, requests), None
        return responses, BatchTiming(prepared_ns - start_ns, called_ns - prepared_ns, self.now_ns() - called_ns)

    def execute_lone(self, request: InferRequest) -> tuple[InferResponse, tuple[int, int, int] | None]:
        """As `execute`, for a batch of one request: its response, and when it was prepared, called and finished.

        No times when the batch failed as a whole.
        """
        requests = [request]
        try:
            inputs = self._prepare(requests)
            prepared_ns = self.now_ns()
            outputs = self._call(inputs) if self._interruption is None else self._interruption.run(requests, inputs)
            called_ns = self.now_ns()
            [response] = self._finish(requests, outputs)
        except ServerError as error:
            return InferResponse(error=error), None
        except (Exception, SystemExit) as error:  # a model that calls sys.exit() must not end a worker
            return self._failed(error, requests)[0], None
        return response, (prepared_ns, called_ns, self.now_ns())

    def prepare(self, requests: Sequence[InferRequest]) -> Any:
        """What the instance gets for these requests. Raises ServerError."""
        return self._prepare(requests)

    @property
    def takes_several_batches(self) -> bool:
        """Whether `execute_batches` may be used."""
        return isinstance(self.instance, BatchInstance) and self.instance.takes_several_batches

    def execute_batches(
        self, batches: Sequence[Sequence[InferRequest]], start_ns: int
    ) -> list[tuple[list[InferResponse], BatchTiming | None]]:
        """As `execute`, for several batches that travel together; each is timed with its share of the whole."""
        assert isinstance(self.instance, BatchInstance), "the caller asked takes_several_batches"
        try:
            prepared = [self._prepare(requests) for requests in batches]
            prepared_ns = self.now_ns()
            results = self.instance.execute_batches(prepared)
            infer_ns = (self.now_ns() - prepared_ns) // len(batches)
        except ServerError as error:
            return [([InferResponse(error=error) for _ in requests], None) for requests in batches]
        except (Exception, SystemExit) as error:
            return [(self._failed(error, requests), None) for requests in batches]
        input_ns = (prepared_ns - start_ns) // len(batches)
        return [
            self.finished(requests, result, input_ns, infer_ns)
            for requests, result in zip(batches, results, strict=True)
        ]

    def finished(
        self, requests: Sequence[InferRequest], result: Any, input_ns: int, infer_ns: int
    ) -> tuple[list[InferResponse], BatchTiming | None]:
        """What `execute` returns, for a batch whose instance has answered `result`."""
        called_ns = self.now_ns()
        try:
            if isinstance(result, ServerError):
                raise result
            responses = self._finish(requests, result)
        except ServerError as error:
            return [InferResponse(error=error) for _ in requests], None
        except Exception as error:
            return self._failed(error, requests), None
        return responses, BatchTiming(input_ns, infer_ns, self.now_ns() - called_ns)

    def _failed(self, error: BaseException, requests: Sequence[InferRequest]) -> list[InferResponse]:
        logger.error(
            "instance '%s' failed on a batch of %d requests", self._instance_name, len(requests), exc_info=error
        )
        failure = InternalError(f"instance '{self._instance_name}' failed: {type(error).__name__}: {error}")
        return [InferResponse(error=failure) for _ in requests]


def _step_to_end(instance: StepInstance, requests: Sequence[InferRequest]) -> None:
    """Carry requests through on an instance that no worker drives yet: warmup."""
    for request in requests:
        instance.add(request)
    while instance.has_work:
        instance.step()
