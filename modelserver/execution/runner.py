"""Runs batches on an instance, and records what came of them: the same for all kinds of worker."""

from __future__ import annotations

from collections.abc import Sequence

from modelserver.core.clock import Clock
from modelserver.core.request import Delivery, InferRequest
from modelserver.core.response import InferResponse
from modelserver.errors import CancelledError
from modelserver.execution.executor import Executor
from modelserver.execution.inline_guard import INLINE_BUDGET_NS, InlineGuard
from modelserver.scheduling.batch import Batch
from modelserver.telemetry.statistics import BatchTiming, FailureReason, ModelStatistics

# Batches that travel to an instance together: so many at most, and so long by what the last ones took,
# because the answers of the first wait for the last.
_MAX_TOGETHER = 16
_TOGETHER_BUDGET_NS = 1_000_000
# A batch may keep the event loop for as long as its requests alone would, up to so many: a millisecond in all.
_MAX_BUDGETS = 5


class BatchRunner:
    """Runs batches on one instance. Called from one thread at a time.

    `is_busy` and `num_executions` may be read from any thread.
    """

    def __init__(self, executor: Executor, statistics: ModelStatistics, clock: Clock) -> None:
        self.is_busy = False
        self.num_executions = 0
        self._guard: InlineGuard | None = None
        self._mean_ns = float(_TOGETHER_BUDGET_NS)
        self._takes_several = executor.takes_several_batches
        self._executor = executor
        self._statistics = statistics
        self._now_ns = clock.now_ns

    @property
    def guard(self) -> InlineGuard | None:
        """Watches executions on the event loop; None where they are not."""
        return self._guard

    @guard.setter
    def guard(self, guard: InlineGuard | None) -> None:
        self._guard = guard
        # A client that leaves is noticed by the event loop, which does nothing else while it executes a batch.
        self._executor.set_interruptible(guard is None)

    def run(self, batch: Batch) -> list[Delivery]:
        """Execute the batch, record it, and return what is to be delivered."""
        if len(batch.requests) == 1:
            request = batch.requests[0]
            return [(request, self.run_lone(request, batch.enqueue_ns[0], batch.taken_ns))]
        guard = self._guard
        if guard is not None and guard.is_worried:
            guard.begin()
        self.is_busy = True
        self.num_executions += 1
        responses, timing = self._executor.execute(batch.requests, batch.taken_ns)
        self._record(batch, responses, timing)
        self.is_busy = False
        if guard is not None:
            guard.note((self._now_ns() - batch.taken_ns) // min(len(batch.requests), _MAX_BUDGETS))
        return list(zip(batch.requests, responses, strict=True))

    def run_lone(self, request: InferRequest, enqueue_ns: int, taken_ns: int) -> InferResponse:
        """As `run`, for a batch of one request, with less around it."""
        guard = self._guard
        if guard is not None and guard.is_worried:
            guard.begin()
        self.is_busy = True
        self.num_executions += 1
        response, times = self._executor.execute_lone(request)
        if times is None:
            done_ns = self._now_ns()
            self._statistics.record_failed_execution()
        else:
            prepared_ns, called_ns, done_ns = times
            if request.trace is not None:
                request.trace.note_compute(taken_ns, prepared_ns, called_ns, done_ns)
            infer_ns = called_ns - prepared_ns
            if response.error is None:
                self._statistics.record_lone(
                    request.rows,
                    prepared_ns - taken_ns,
                    infer_ns,
                    done_ns - called_ns,
                    taken_ns - enqueue_ns,
                    done_ns - request.arrival_ns,
                )
            else:
                timing = BatchTiming(prepared_ns - taken_ns, infer_ns, done_ns - called_ns)
                self._statistics.record_batch(request.rows, timing, queue_ns=(), request_ns=())
            if self._takes_several:
                self._remember(infer_ns)
        if response.error is not None:
            self._statistics.record_failures(_reason_of(response), (done_ns - request.arrival_ns,))
        self.is_busy = False
        if guard is not None and (done_ns - taken_ns > INLINE_BUDGET_NS or guard.is_worried):
            guard.note(done_ns - taken_ns)
        return response

    def close(self, deadline_s: float) -> None:
        """Wait until nothing is left to be answered, at most until then (monotonic). Blocking; called at the end."""

    @property
    def num_further(self) -> int:
        """Batches that may be run together with another one; 0 where that brings nothing or takes too long."""
        if not self._takes_several:
            return 0
        return max(1, min(_MAX_TOGETHER, int(_TOGETHER_BUDGET_NS / self._mean_ns))) - 1

    def run_together(self, batches: Sequence[Batch]) -> list[Delivery]:
        """As `run`, for batches that travel to the instance together."""
        self.is_busy = True
        self.num_executions += len(batches)
        results = self._executor.execute_batches([batch.requests for batch in batches], batches[0].taken_ns)
        deliveries: list[Delivery] = []
        for batch, (responses, timing) in zip(batches, results, strict=True):
            self._record(batch, responses, timing)
            deliveries += zip(batch.requests, responses, strict=True)
        self.is_busy = False
        return deliveries

    def _record(self, batch: Batch, responses: Sequence[InferResponse], timing: BatchTiming | None) -> None:
        taken_ns = batch.taken_ns
        now_ns = self._now_ns() if timing is None else taken_ns + timing.total_ns
        if timing is not None and self._statistics.is_traced:
            note_traces(batch, timing)
        request_ns = [now_ns - request.arrival_ns for request in batch.requests]
        queue_ns = [taken_ns - enqueue_ns for enqueue_ns in batch.enqueue_ns]
        failed = [position for position, response in enumerate(responses) if response.error is not None]
        if failed:
            for position in failed:
                self._statistics.record_failures(_reason_of(responses[position]), (request_ns[position],))
            succeeded = [position for position, response in enumerate(responses) if response.error is None]
            request_ns = [request_ns[position] for position in succeeded]
            queue_ns = [queue_ns[position] for position in succeeded]
        if timing is None:
            self._statistics.record_failed_execution()
        else:
            self._remember(timing.compute_infer_ns)
            self._statistics.record_batch(batch.rows, timing, queue_ns=queue_ns, request_ns=request_ns)

    def _remember(self, infer_ns: int) -> None:
        """A running mean that forgets within some ten batches, and a slow one at once."""
        self._mean_ns = max(1, infer_ns, self._mean_ns + (infer_ns - self._mean_ns) / 8)


def _reason_of(response: InferResponse) -> FailureReason:
    """Why a response is an error: its client left while it was executed, or the instance failed."""
    return FailureReason.CANCELED if isinstance(response.error, CancelledError) else FailureReason.BACKEND


def note_traces(batch: Batch, timing: BatchTiming) -> None:
    """Tell the traces of a batch's requests, of the few that have one, when it was computed."""
    taken_ns = batch.taken_ns
    prepared_ns = taken_ns + timing.compute_input_ns
    called_ns = prepared_ns + timing.compute_infer_ns
    for request in batch.requests:
        if request.trace is not None:
            request.trace.note_compute(taken_ns, prepared_ns, called_ns, taken_ns + timing.total_ns)
