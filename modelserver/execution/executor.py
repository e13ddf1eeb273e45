"""Runs one batch on one instance: gather, execute, scatter, and every failure turned into an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from modelserver.backend import BatchInstance, TensorInstance
from modelserver.core.clock import Clock
from modelserver.core.request import InferRequest
from modelserver.core.response import InferResponse
from modelserver.errors import InternalError, ServerError
from modelserver.execution.assemble import Assembler
from modelserver.telemetry.statistics import BatchTiming

logger = logging.getLogger(__name__)


class Executor:
    """One instance with what it needs around it. Called from one thread at a time."""

    def __init__(
        self, instance: BatchInstance | TensorInstance, assembler: Assembler, *, instance_name: str, clock: Clock
    ) -> None:
        self.instance = instance
        self._instance_name = instance_name
        self._now_ns = clock.now_ns
        self._prepare: Callable[[Sequence[InferRequest]], Any]
        self._call: Callable[[Any], Any]
        self._finish: Callable[[Sequence[InferRequest], Any], list[InferResponse]]
        if isinstance(instance, TensorInstance):
            self._prepare, self._call, self._finish = assembler.gather, instance.run, assembler.scatter
        else:
            self._prepare, self._call, self._finish = assembler.shape_inputs, instance.execute, assembler.collect

    def execute(
        self, requests: Sequence[InferRequest], start_ns: int
    ) -> tuple[list[InferResponse], BatchTiming | None]:
        """One response for each request, in order, and the timing; None when the batch failed as a whole.

        Never raises: what an instance raises becomes the response of every request of the batch.
        """
        try:
            inputs = self._prepare(requests)
            prepared_ns = self._now_ns()
            outputs = self._call(inputs)
            called_ns = self._now_ns()
            responses = self._finish(requests, outputs)
        except ServerError as error:
            return [InferResponse(error=error) for _ in requests], None
        except (Exception, SystemExit) as error:  # a model that calls sys.exit() must not end a worker
            logger.exception("instance '%s' failed on a batch of %d requests", self._instance_name, len(requests))
            failure = InternalError(f"instance '{self._instance_name}' failed: {type(error).__name__}: {error}")
            return [InferResponse(error=failure) for _ in requests], None
        return responses, BatchTiming(prepared_ns - start_ns, called_ns - prepared_ns, self._now_ns() - called_ns)
