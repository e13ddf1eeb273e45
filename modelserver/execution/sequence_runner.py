"""Runs batches of sequences: padding has no answer, and what is to run again is no answer yet."""

from __future__ import annotations

from modelserver.core.request import Delivery
from modelserver.core.response import RESCHEDULE
from modelserver.execution.runner import BatchRunner
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.sequence_batch import SequenceBatch


class SequenceRunner(BatchRunner):
    """As `BatchRunner`, for batches of a `SequenceBatcher`."""

    def run(self, batch: Batch) -> list[Delivery]:
        assert isinstance(batch, SequenceBatch), "only a sequence batcher feeds this"
        guard = self.guard
        if guard is not None and guard.is_worried:
            guard.begin()
        self.is_busy = True
        self.num_executions += 1
        responses, timing = self._executor.execute(batch.requests, batch.taken_ns)
        real = [
            (position, request)
            for position, request in enumerate(batch.requests)
            if not request.is_padding and responses[position] is not RESCHEDULE
        ]
        batch.rescheduled += [
            request for request, response in zip(batch.requests, responses, strict=True) if response is RESCHEDULE
        ]
        answered = Batch(
            [request for _, request in real],
            [batch.enqueue_ns[position] for position, _ in real],
            batch.rows,
            batch.taken_ns,
        )
        deliveries = [(request, responses[position]) for position, request in real]
        self._record(answered, [response for _, response in deliveries], timing)
        if timing is not None and batch.num_padding:
            self._statistics.record_padding(batch.num_padding)
        self.is_busy = False
        if guard is not None:
            guard.note(self._now_ns() - batch.taken_ns)
        return deliveries
