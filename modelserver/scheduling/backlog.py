"""Sequences that wait for a slot: first come first served, or shared by their callers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from modelserver.core.request import InFlightRequest
from modelserver.scheduling.fair_queue import FairQueue
from modelserver.scheduling.queue import QueueEntry
from modelserver.scheduling.sequence import LiveSequence


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
        """It waits no more, if it did."""
        self._sequences.pop(sequence, None)

    def pop(self) -> LiveSequence:
        """The one that gets the next slot. There must be one."""
        return self._sequences.popitem(last=False)[0]

    def num_before(self, request: InFlightRequest) -> int:  # noqa: ARG002
        """The sequences that get a slot before one that this request would begin."""
        return len(self)

    def last_of_hog(self, newcomer: InFlightRequest) -> LiveSequence | None:  # noqa: ARG002
        """The sequence that gives its place to a newcomer where requests are too many; None: the newcomer goes."""
        return None


class _Ticket(QueueEntry):
    """A sequence's place in a queue that callers share."""

    __slots__ = ("sequence",)

    def __init__(self, sequence: LiveSequence, first: InFlightRequest) -> None:
        super().__init__(first, 1, 0)
        self.sequence = sequence


class FairBacklog(Backlog):
    """By turns of the callers and their weights, each caller's own in the order in which they came.

    A sequence counts as one, however long it will be: nobody knows that before its END.
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
        assert isinstance(ticket, _Ticket), "somebody waits"
        self.discard(ticket.sequence)
        return ticket.sequence

    def num_before(self, request: InFlightRequest) -> int:
        return self._queue.num_before(QueueEntry(request, 1, 0))

    def last_of_hog(self, newcomer: InFlightRequest) -> LiveSequence | None:
        ticket = self._queue.last_of_hog(QueueEntry(newcomer, 1, 0))
        return ticket.sequence if isinstance(ticket, _Ticket) else None
