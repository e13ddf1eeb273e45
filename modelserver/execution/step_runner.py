"""Runs a `StepInstance`: gives it requests, steps it, aborts requests, and fails them with it."""

from __future__ import annotations

import logging
import threading
from collections import deque

from modelserver.backend import StepInstance
from modelserver.core.clock import Clock
from modelserver.core.request import Delivery, InFlightRequest
from modelserver.errors import CancelledError, InternalError, ServerError, UnavailableError
from modelserver.execution.executor import Executor
from modelserver.execution.response_dispatcher import OpenResponse, ResponseDispatcher
from modelserver.execution.runner import Runner
from modelserver.platform.device_loss import note_device_error
from modelserver.scheduling.batch import Batch
from modelserver.telemetry.statistics import ModelStatistics

logger = logging.getLogger(__name__)


class StepRunner(Runner):
    """Called from the worker's thread. The event loop sets `signal`, the worker's, when a request is cancelled.

    The dispatcher knows which requests have not ended, and records each when it ends. `is_broken` may be read from any
    thread.
    """

    def __init__(
        self,
        executor: Executor,
        instance: StepInstance,
        dispatcher: ResponseDispatcher,
        *,
        name: str,
        statistics: ModelStatistics,
        clock: Clock,
    ) -> None:
        super().__init__(executor, statistics, clock, dispatcher)
        self.model_name = dispatcher.model_name
        self.signal: threading.Event | None = None
        self._dispatcher = dispatcher
        self._instance = instance
        self._name = name
        self._fault = ""
        # Cancelled requests that the instance has yet to abort. The event loop thread appends to it.
        self._cancelled: deque[OpenResponse] = deque()

    @property
    def has_work(self) -> bool:
        return not self.is_broken and self._instance.has_work

    @property
    def has_room(self) -> bool:
        return self.is_broken or self._instance.has_room

    def run(self, batch: Batch) -> list[Delivery]:
        """Give the instance these requests, which it answers in its steps."""
        for open_response in self._dispatcher.open(batch.requests, batch.enqueue_ns, batch.taken_ns):
            refusal = self._add(open_response.request)
            open_response.settle(refusal, has_failed=refusal is not None)
            if refusal is None:
                self._watch(open_response)
        return []

    def abort_cancelled(self) -> None:
        """Abort and end the requests that were cancelled since the last call."""
        while self._cancelled:
            open_response = self._cancelled.popleft()
            if open_response.is_ended:
                continue
            self._abort(open_response)
            open_response.end(CancelledError(f"request to model '{self._dispatcher.model_name}' was cancelled"))

    def step(self) -> None:
        """One step of the instance. Its responses go to the event loop together, after the step."""
        self.is_busy = True
        self._dispatcher.hold()
        try:
            self._instance.step()
        except ServerError as error:
            logger.error("instance '%s' failed in a step: %s", self._name, error.message)
            self.fail_all(error)
        except (Exception, SystemExit) as error:  # a model that calls sys.exit() must not end a worker
            logger.exception("instance '%s' failed in a step with %d requests", self._name, self._dispatcher.num_open)
            note_device_error(error)
            self.fail_all(InternalError(f"instance '{self._name}' failed: {type(error).__name__}: {error}"))
        finally:
            self._dispatcher.release()
        self.is_busy = False

    def fail_all(self, error: ServerError) -> None:
        """End every request with this error. An instance that still has work after that is not called again."""
        open_responses = self._dispatcher.open_responses()
        for open_response in open_responses:
            self._abort(open_response)
        if not self.is_broken and self._has_work_left():
            self._break(f"it still has work after all its requests were aborted because of: {error.message}")
        for open_response in open_responses:
            open_response.end(error)

    def _add(self, request: InFlightRequest) -> ServerError | None:
        """The error if the instance refuses the request; None if it accepts it."""
        if self.is_broken:
            return UnavailableError(f"instance '{self._name}' is out of order, load the model again: {self._fault}")
        self.num_executions += 1
        try:
            self.executor.prepare([request])
            self._instance.add(request)
        except ServerError as error:
            return error
        except (Exception, SystemExit) as error:
            logger.exception("instance '%s' failed to take a request on", self._name)
            return InternalError(f"instance '{self._name}' failed: {type(error).__name__}: {error}")
        return None

    def _watch(self, open_response: OpenResponse) -> None:
        """From here on a cancel of the request takes effect before the next step."""
        request = open_response.request
        request.on_cancel = self._on_cancel
        if request.is_cancelled:  # just before
            self._cancelled.append(open_response)

    def _on_cancel(self, request: InFlightRequest) -> None:
        # Looked up here: a request that referred to its open response, and so to the instance, would keep an unloaded
        # model alive until the next garbage collection.
        open_response = self._dispatcher.open_response_of(request)
        if open_response is not None:
            open_response.reading.cancel()
            self._cancelled.append(open_response)
            if self.signal is not None:
                self.signal.set()

    def _abort(self, open_response: OpenResponse) -> None:
        open_response.abandon()
        if self.is_broken:
            return
        try:
            self._instance.abort(open_response.request)
        except (Exception, SystemExit) as error:
            logger.exception("instance '%s' failed to abort a request", self._name)
            self._break(f"it failed to abort a request: {type(error).__name__}: {error}")

    def _has_work_left(self) -> bool:
        try:
            return self._instance.has_work
        except Exception:
            logger.exception("instance '%s' cannot tell whether it has work", self._name)
            return True

    def _break(self, fault: str) -> None:
        logger.error("instance '%s' is out of order: %s", self._name, fault)
        self.is_broken = True
        self._fault = fault
