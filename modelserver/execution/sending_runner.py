"""Runs batches on an instance that answers later: what it returns goes the way of what it sends."""

from __future__ import annotations

from collections.abc import Sequence

from modelserver.core.clock import Clock
from modelserver.core.request import Delivery
from modelserver.core.response import RESCHEDULE
from modelserver.execution.executor import Executor
from modelserver.execution.runner import BatchRunner, note_traces
from modelserver.execution.sending import Line, SenderDesk
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.sequence_batch import SequenceBatch
from modelserver.telemetry.statistics import BatchTiming, ModelStatistics


class SendingRunner(BatchRunner):
    """As `BatchRunner`, but responses reach the event loop by the desk: none is returned."""

    def __init__(self, executor: Executor, statistics: ModelStatistics, clock: Clock, desk: SenderDesk) -> None:
        super().__init__(executor, statistics, clock)
        self.desk = desk

    def run(self, batch: Batch) -> list[Delivery]:
        guard = self.guard
        if guard is not None and guard.is_worried:
            guard.begin()
        self.is_busy = True
        self.num_executions += 1
        lines = self.desk.open(batch.requests, batch.enqueue_ns, batch.taken_ns)
        entries, timing = self._executor.execute(batch.requests, batch.taken_ns)
        self.settle(batch, lines, entries, timing)
        self.is_busy = False
        if guard is not None:
            guard.note(self._now_ns() - batch.taken_ns)
        return []

    def run_together(self, batches: Sequence[Batch]) -> list[Delivery]:
        self.is_busy = True
        self.num_executions += len(batches)
        lines = [self.desk.open(batch.requests, batch.enqueue_ns, batch.taken_ns) for batch in batches]
        results = self._executor.execute_batches([batch.requests for batch in batches], batches[0].taken_ns)
        for batch, of_batch, (entries, timing) in zip(batches, lines, results, strict=True):
            self.settle(batch, of_batch, entries, timing)
        self.is_busy = False
        return []

    def close(self, deadline_s: float) -> None:
        self.desk.close(deadline_s)

    def settle(
        self, batch: Batch, lines: Sequence[Line], entries: Sequence[object], timing: BatchTiming | None
    ) -> None:
        """Let what `execute` returned go its way, and record the batch."""
        for line, entry in zip(lines, entries, strict=True):
            line.settle(entry, has_failed=timing is None)
        if isinstance(batch, SequenceBatch):
            batch.rescheduled += [
                line.request for line, entry in zip(lines, entries, strict=True) if entry is RESCHEDULE
            ]
            if timing is not None and batch.num_padding:
                self._statistics.record_padding(batch.num_padding)
        if timing is not None and self._statistics.is_traced:
            note_traces(batch, timing)
        if timing is None:
            self._statistics.record_failed_execution()
            return
        self._remember(timing.compute_infer_ns)
        if not self.desk.is_stepped:
            self._statistics.record_batch(batch.rows, timing, queue_ns=(), request_ns=())
