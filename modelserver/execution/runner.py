"""Runs batches on an instance, and records and answers them, wherever the instance executes.

With a `ResponseDispatcher` the instance answers later or many times, and returned responses take the same way as sent
ones. Without one the returned responses are the answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from modelserver.core.clock import Clock
from modelserver.core.request import Delivery, InFlightRequest
from modelserver.core.response import RESCHEDULE, InferResponse
from modelserver.errors import CancelledError
from modelserver.execution.executor import Executor, Outcome
from modelserver.execution.inline import INLINE_BUDGET_NS, InlineGuard
from modelserver.execution.response_dispatcher import OpenResponse, ResponseDispatcher
from modelserver.scheduling.batch import Batch
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import FailureReason

# At most this many batches travel to an instance together, and only as many as it is expected to execute within the
# budget, because the answers of the first wait for the last.
MAX_TOGETHER = 16
TOGETHER_BUDGET_NS = 1_000_000
# A batch may keep the event loop for one budget per request, but at most for this many.
_MAX_BUDGETS = 5


class Runner:
    """Runs batches on one instance. Called from one thread at a time.

    `run` is `begin`, the execution, and `end`. A worker whose instance executes elsewhere calls `begin` and `end`.
    `is_busy` and `num_executions` may be read from any thread.
    """

    # Whether the instance, which goes in steps, is out of order. May be read from any thread.
    is_broken = False

    def __init__(
        self,
        executor: Executor,
        statistics: ModelStatistics,
        clock: Clock,
        dispatcher: ResponseDispatcher | None = None,
    ) -> None:
        self.executor = executor
        self.dispatcher = dispatcher
        self.is_busy = False
        self.num_executions = 0
        self._guard: InlineGuard | None = None
        self._mean_ns = float(TOGETHER_BUDGET_NS)
        self._statistics = statistics
        self._now_ns = clock.now_ns

    @property
    def guard(self) -> InlineGuard | None:
        """Watches executions on the event loop; None if they happen elsewhere."""
        return self._guard

    @guard.setter
    def guard(self, guard: InlineGuard | None) -> None:
        self._guard = guard
        # The event loop notices clients that leave, but not while it executes a batch itself.
        self.executor.set_interruptible(guard is None)

    def run(self, batch: Batch) -> list[Delivery]:
        """Execute the batch, record it, and return the responses to deliver."""
        if len(batch.requests) == 1 and self.dispatcher is None and not batch.has_slots:
            request = batch.requests[0]
            return [(request, self.run_lone(request, batch.enqueue_ns[0], batch.taken_ns))]
        guard = self._guard
        if guard is not None and guard.is_worried:
            guard.begin()
        open_responses = self.begin(batch)
        deliveries = self.end(batch, open_responses, self.executor.run(batch.requests))
        self.is_busy = False
        if guard is not None:
            duration_ns = (self._now_ns() - batch.taken_ns) // min(len(batch.requests), _MAX_BUDGETS)
            if duration_ns > INLINE_BUDGET_NS or guard.is_worried:
                guard.note(duration_ns)
        return deliveries

    def run_lone(self, request: InFlightRequest, enqueue_ns: int, taken_ns: int) -> InferResponse:
        """As `run`, for one request without a batch, of an instance that answers at once."""
        guard = self._guard
        if guard is not None and guard.is_worried:
            guard.begin()
        self.is_busy = True
        self.num_executions += 1
        outcome = self.executor.run([request])
        done_ns = self._record_lone(request, outcome, enqueue_ns, taken_ns)
        self.is_busy = False
        if guard is not None and (done_ns - taken_ns > INLINE_BUDGET_NS or guard.is_worried):
            guard.note(done_ns - taken_ns)
        response: InferResponse = outcome.entries[0]
        return response

    def begin(self, batch: Batch) -> Sequence[OpenResponse]:
        """The batch is about to be executed; its open responses, if the instance answers later."""
        self.is_busy = True
        self.num_executions += 1
        dispatcher = self.dispatcher
        return () if dispatcher is None else dispatcher.open(batch.requests, batch.enqueue_ns, batch.taken_ns)

    def end(self, batch: Batch, open_responses: Sequence[OpenResponse], outcome: Outcome) -> list[Delivery]:
        """The batch has been executed: record it, and return the responses to deliver."""
        if self.dispatcher is not None:
            self._settle(batch, open_responses, outcome, self.dispatcher)
            return []
        if batch.has_slots:
            batch, outcome = _answered(batch, outcome, self._statistics)
        elif len(batch.requests) == 1:
            request = batch.requests[0]
            self._record_lone(request, outcome, batch.enqueue_ns[0], batch.taken_ns)
            return [(request, outcome.entries[0])]
        self._record(batch, outcome)
        return list(zip(batch.requests, outcome.entries, strict=True))

    def close(self, deadline_s: float) -> None:
        """Wait until every request is answered, at most until `deadline_s` (monotonic). Blocking; called at the end."""
        if self.dispatcher is not None:
            self.dispatcher.close(deadline_s)

    @property
    def num_further(self) -> int:
        """How many batches to run together with another one; 0 if that is of no use or takes too long."""
        if not self.executor.takes_several_batches:
            return 0
        return max(1, min(MAX_TOGETHER, int(TOGETHER_BUDGET_NS / self._mean_ns))) - 1

    def run_together(self, batches: Sequence[Batch]) -> list[Delivery]:
        """As `run`, for batches that travel to the instance together."""
        begun = [self.begin(batch) for batch in batches]
        outcomes = self.executor.run_together([batch.requests for batch in batches])
        deliveries: list[Delivery] = []
        for batch, open_responses, outcome in zip(batches, begun, outcomes, strict=True):
            deliveries += self.end(batch, open_responses, outcome)
        self.is_busy = False
        return deliveries

    def _settle(
        self, batch: Batch, open_responses: Sequence[OpenResponse], outcome: Outcome, dispatcher: ResponseDispatcher
    ) -> None:
        """Send the responses that `execute` returned, and record the batch."""
        for opened, entry in zip(open_responses, outcome.entries, strict=True):
            opened.settle(entry, has_failed=outcome.has_failed)
        if batch.has_slots:
            _answered(batch, outcome, self._statistics)
        if outcome.has_failed:
            self._statistics.record_failed_execution()
            return
        timing = outcome.timing(batch.taken_ns)
        if self._statistics.is_traced:
            _note_traces(batch, outcome)
        self._remember(timing.compute_infer_ns)
        if not dispatcher.is_stepped:
            self._statistics.record_batch(batch.rows, timing, queue_ns=(), request_ns=())

    def _record_lone(self, request: InFlightRequest, outcome: Outcome, enqueue_ns: int, taken_ns: int) -> int:
        """Record a batch of one request; when it was done."""
        response: InferResponse = outcome.entries[0]
        statistics = self._statistics
        if outcome.has_failed:
            done_ns = self._now_ns()
            statistics.record_failed_execution()
        else:
            prepared_ns, called_ns, done_ns = outcome.prepared_ns, outcome.called_ns, outcome.done_ns
            if request.trace is not None:
                request.trace.note_compute(taken_ns, prepared_ns, called_ns, done_ns)
            infer_ns = called_ns - prepared_ns
            if response.error is None:
                statistics.record_lone(
                    request.rows,
                    prepared_ns - taken_ns,
                    infer_ns,
                    done_ns - called_ns,
                    taken_ns - enqueue_ns,
                    done_ns - request.arrival_ns,
                )
            else:
                statistics.record_batch(request.rows, outcome.timing(taken_ns), queue_ns=(), request_ns=())
            if self.executor.takes_several_batches:
                self._remember(infer_ns)
        if response.error is not None:
            statistics.record_failures(_reason_of(response), (done_ns - request.arrival_ns,))
        return done_ns

    def _record(self, batch: Batch, outcome: Outcome) -> None:
        taken_ns = batch.taken_ns
        responses: Sequence[InferResponse] = outcome.entries
        now_ns = self._now_ns() if outcome.has_failed else outcome.done_ns
        if not outcome.has_failed and self._statistics.is_traced:
            _note_traces(batch, outcome)
        request_ns = [now_ns - request.arrival_ns for request in batch.requests]
        queue_ns = [taken_ns - enqueue_ns for enqueue_ns in batch.enqueue_ns]
        failed = [position for position, response in enumerate(responses) if response.error is not None]
        if failed:
            for position in failed:
                self._statistics.record_failures(_reason_of(responses[position]), (request_ns[position],))
            succeeded = [position for position, response in enumerate(responses) if response.error is None]
            request_ns = [request_ns[position] for position in succeeded]
            queue_ns = [queue_ns[position] for position in succeeded]
        if outcome.has_failed:
            self._statistics.record_failed_execution()
        else:
            timing = outcome.timing(taken_ns)
            self._remember(timing.compute_infer_ns)
            self._statistics.record_batch(batch.rows, timing, queue_ns=queue_ns, request_ns=request_ns)

    def _remember(self, infer_ns: int) -> None:
        """A running mean over about ten batches, which follows a slow batch at once."""
        self._mean_ns = max(1, infer_ns, self._mean_ns + (infer_ns - self._mean_ns) / 8)


def _answered(batch: Batch, outcome: Outcome, statistics: ModelStatistics) -> tuple[Batch, Outcome]:
    """The answered part of a batch of sequences: without padding, and without requests that run again."""
    responses = outcome.entries
    batch.rescheduled += [
        request for request, response in zip(batch.requests, responses, strict=True) if response is RESCHEDULE
    ]
    if batch.num_padding and not outcome.has_failed:
        statistics.record_padding(batch.num_padding)
    if not batch.num_padding and not batch.rescheduled:
        return batch, outcome
    real = [
        position
        for position, request in enumerate(batch.requests)
        if not request.is_padding and responses[position] is not RESCHEDULE
    ]
    answered = Batch(
        [batch.requests[position] for position in real],
        [batch.enqueue_ns[position] for position in real],
        batch.rows,
        batch.taken_ns,
    )
    of_answered = Outcome(
        [responses[position] for position in real],
        outcome.prepared_ns,
        outcome.called_ns,
        outcome.done_ns,
        outcome.has_failed,
    )
    return answered, of_answered


def _reason_of(response: InferResponse) -> FailureReason:
    """Why a request failed: its client left while it was executed, or the instance failed."""
    return FailureReason.CANCELED if isinstance(response.error, CancelledError) else FailureReason.BACKEND


def _note_traces(batch: Batch, outcome: Outcome) -> None:
    """Note the times of a batch in the traces of its requests, few of which have one."""
    for request in batch.requests:
        if request.trace is not None:
            request.trace.note_compute(batch.taken_ns, outcome.prepared_ns, outcome.called_ns, outcome.done_ns)
