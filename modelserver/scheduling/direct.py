"""The scheduler of models that answer at once: no queue, no thread, no turn of the event loop in between.

For instances that never block (`Backend.runs_inline`) and models that form no batches: a request has nothing to wait
for, so it is executed where it is submitted.
"""

from __future__ import annotations

from collections.abc import Callable

from modelserver.core.clock import Clock, SystemClock
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, ResponseStream
from modelserver.errors import ServerError, UnavailableError
from modelserver.scheduling.admission import refuse
from modelserver.scheduling.scheduler import Scheduler
from modelserver.telemetry.statistics import ModelStatistics

# Executes a request. The numbers are when it was queued and when it was taken (ns): the same time, here.
Run = Callable[[InFlightRequest, int, int], InferResponse]


class DirectScheduler(Scheduler):
    """Executes each request within `submit`; in all else as `Batcher`. Instances take turns.

    Everything belongs to the event loop thread, unless it says otherwise.
    """

    runs_directly = True
    inflight = 0

    def __init__(self, model_name: str, *, statistics: ModelStatistics, clock: Clock | None = None) -> None:
        self._model_name = model_name
        self._statistics = statistics
        self._now_ns = (clock or SystemClock()).now_ns
        self._is_stopped = False
        self._runs: tuple[Run, ...] = ()
        self._next = 0

    def attach(self, run: Run) -> None:
        """Use an instance from now on. From any thread."""
        self._runs = (*self._runs, run)

    def detach(self, run: Run) -> None:
        """Stop using an instance. Called from the event loop thread, so that no call of it is in progress."""
        self._runs = tuple(attached for attached in self._runs if attached != run)

    def submit(self, request: InFlightRequest) -> ResponseStream:
        """Execute the request; its answer is on the stream when this returns.

        Raises UnavailableError (stopped) or CancelledError: then the caller answers.
        """
        now_ns = self._now_ns()
        if request.arrival_ns == 0:
            request.arrival_ns = now_ns
        if self._is_stopped or request.is_cancelled or request.deadline_ns is not None:
            refusal = refuse(request, self._model_name, self._statistics, now_ns, is_stopped=self._is_stopped)
            if refusal is not None:
                raise refusal
        runs = self._runs
        if len(runs) == 1:
            run = runs[0]
        elif runs:
            self._next = (self._next + 1) % len(runs)
            run = runs[self._next]
        else:
            raise UnavailableError(f"model '{self._model_name}' has no instance that executes requests")
        stream = request.stream
        stream.deliver(run(request, now_ns, now_ns))
        return stream

    def stop(self) -> None:
        """Refuse new requests."""
        self._is_stopped = True

    def abort(self, error: ServerError) -> None:  # noqa: ARG002
        """As `stop`, because no request waits in a queue. From any thread."""
        self._is_stopped = True
