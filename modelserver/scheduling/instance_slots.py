"""What one instance has of the sequences of its model: its slots, and the requests in its worker's hands."""

from __future__ import annotations

from modelserver.core.request import InFlightRequest
from modelserver.scheduling.drain_rate import DrainRate
from modelserver.scheduling.fair_queue import FairQueue
from modelserver.scheduling.parked_workers import WaitingWorker
from modelserver.scheduling.queue import QueueEntry, RequestQueue
from modelserver.scheduling.sequence import SequenceEnd, SequenceEntry, SequenceSlot
from modelserver.scheduling.sequence_rules import SequenceRules


class InstanceSlots:
    """The sequences of one instance. `taken` are the requests that its worker has.

    `ended` are sequences that the instance is to be told about, unless it does not want to be (`hears_ends`).
    `is_closed`: no further sequence comes here. With the strategy `oldest` the requests that may be executed are in
    `queue`, which callers share if `is_fair`, and `rate` is how fast it empties.
    """

    def __init__(self, rules: SequenceRules, number: int, *, hears_ends: bool, is_fair: bool = False) -> None:
        self.number = number
        self.hears_ends = hears_ends
        self.slots = [SequenceSlot(self, index) for index in range(rules.num_slots)]
        self.num_sequences = 0
        self.taken: list[SequenceEntry] = []
        self.ended: list[tuple[int | str, SequenceEnd]] = []
        self.parked: WaitingWorker | None = None  # the instance's worker, while it sleeps
        self.is_closed = False
        self.rate = DrainRate()
        self.queue: RequestQueue | None = None
        if (oldest := rules.oldest) is not None:
            make = FairQueue if is_fair else RequestQueue
            self.queue = make(
                max_rows=oldest.max_rows, ripe_rows=oldest.preferred_rows[0], keep_order=oldest.keep_order
            )

    def wake(self) -> None:
        """Let the worker look for something to do. Called with the batcher's lock held."""
        worker, self.parked = self.parked, None
        if worker is not None:
            worker.is_parked = False
            worker.is_woken = True
            worker.wake()

    def num_before(self, request: InFlightRequest) -> int:
        """The requests that are executed before this one, if it may be executed now."""
        queue = self.queue
        if isinstance(queue, FairQueue):
            return queue.num_before(QueueEntry(request, 1, 0))
        return len(queue) if queue is not None else 0
