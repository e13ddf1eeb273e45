"""Where sequences are: in the slots of instances, or in the backlog, waiting for one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush

from modelserver.core.request import InFlightRequest
from modelserver.scheduling.admission import DrainRate
from modelserver.scheduling.fair_queue import FairQueue
from modelserver.scheduling.parked_workers import WaitingWorker
from modelserver.scheduling.queue import QueueEntry, RequestQueue
from modelserver.scheduling.sequence import LiveSequence, SequenceEnd, SequenceEntry, SequenceSlot
from modelserver.scheduling.sequence_policy import SequenceRules


class InstanceSlots:
    """The sequences of one instance. `taken` are the requests that its worker has.

    `ended` are sequences whose end the instance has yet to hear of, if it asked for that (`hears_ends`).
    `is_closed`: it gets no further sequences. With the strategy `oldest` the requests that may be executed are in
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
        """Let the worker look for a batch. Called with the batcher's lock held."""
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


class Backlog:
    """In the order in which they came. Every call is made under the batcher's lock."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[LiveSequence, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._sequences)

    def add(self, sequence: LiveSequence, first: InFlightRequest) -> None:  # noqa: ARG002 - of whose caller
        """The sequence, of which `first` is the first request, waits behind those that go before it."""
        self._sequences[sequence] = None

    def discard(self, sequence: LiveSequence) -> None:
        """Remove it, if it waits."""
        self._sequences.pop(sequence, None)

    def pop(self) -> LiveSequence:
        """The sequence that gets the next slot. At least one must wait."""
        return self._sequences.popitem(last=False)[0]

    def num_before(self, request: InFlightRequest) -> int:  # noqa: ARG002
        """The sequences that get a slot before one that this request would begin."""
        return len(self)

    def last_of_hog(self, newcomer: InFlightRequest) -> LiveSequence | None:  # noqa: ARG002
        """The sequence that gives its place to a newcomer in a full queue; None: the newcomer is refused."""
        return None


class _Ticket(QueueEntry):
    """A sequence's place in a queue that callers share."""

    __slots__ = ("sequence",)

    def __init__(self, sequence: LiveSequence, first: InFlightRequest) -> None:
        super().__init__(first, 1, 0)
        self.sequence = sequence


class FairBacklog(Backlog):
    """By turns of the callers and their weights, each caller's own in the order in which they came.

    A sequence counts as one, because its length is unknown before its END.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue = FairQueue()
        self._tickets: dict[LiveSequence, _Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._tickets

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._tickets)

    def add(self, sequence: LiveSequence, first: InFlightRequest) -> None:
        ticket = self._tickets[sequence] = _Ticket(sequence, first)
        self._queue.add(ticket)

    def discard(self, sequence: LiveSequence) -> None:
        ticket = self._tickets.pop(sequence, None)
        if ticket is not None:
            self._queue.remove(ticket)

    def pop(self) -> LiveSequence:
        ticket = self._queue.first()
        assert isinstance(ticket, _Ticket), "a sequence waits"
        self.discard(ticket.sequence)
        return ticket.sequence

    def num_before(self, request: InFlightRequest) -> int:
        return self._queue.num_before(QueueEntry(request, 1, 0))

    def last_of_hog(self, newcomer: InFlightRequest) -> LiveSequence | None:
        ticket = self._queue.last_of_hog(QueueEntry(newcomer, 1, 0))
        return ticket.sequence if isinstance(ticket, _Ticket) else None


class SequencePlaces:
    """Every call is made under the batcher's lock. `is_fair`: callers share slots by weight.

    `num_released` counts the slots that became free, until `SequenceAdmission` reads and resets it.
    """

    def __init__(self, *, is_fair: bool) -> None:
        self.backlog = FairBacklog() if is_fair else Backlog()
        self.num_released = 0
        self._free: list[tuple[int, int, SequenceSlot]] = []

    def place(self, sequence: LiveSequence, first: InFlightRequest) -> None:
        """Give a new sequence the free slot with the lowest index, or a place in the backlog."""
        slot = self.free_slot()
        if slot is None:
            self.backlog.add(sequence, first)
        else:
            heappop(self._free)
            _bind(sequence, slot)

    def free_slot(self) -> SequenceSlot | None:
        """The one with the lowest index, of an instance that stays."""
        while self._free:
            slot = self._free[0][2]
            if not owner_of(slot).is_closed:
                return slot
            heappop(self._free)
        return None

    def vacate(self, sequence: LiveSequence) -> None:
        """The sequence leaves its slot. The caller calls `refill` for the slot."""
        slot = sequence.slot
        assert slot is not None, "only a sequence with a slot leaves it"
        sequence.slot = slot.sequence = None
        owner_of(slot).num_sequences -= 1

    def refill(self, slot: SequenceSlot) -> LiveSequence | None:
        """A slot of an instance that stays is free: give it to the next waiting sequence, which is returned, if any."""
        self.num_released += 1
        if not self.backlog:
            heappush(self._free, (slot.index, owner_of(slot).number, slot))
            return None
        sequence = self.backlog.pop()
        _bind(sequence, slot)
        return sequence


def owner_of(slot: SequenceSlot) -> InstanceSlots:
    """The instance that has the slot."""
    owner = slot.owner
    assert isinstance(owner, InstanceSlots), "slots belong to instances"
    return owner


def _bind(sequence: LiveSequence, slot: SequenceSlot) -> None:
    slot.sequence, sequence.slot = sequence, slot
    owner_of(slot).num_sequences += 1
