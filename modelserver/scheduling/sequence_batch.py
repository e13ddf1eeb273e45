"""A batch of requests of different sequences, and the rows of slots that have none."""

from __future__ import annotations

from collections.abc import Sequence

from modelserver.core.request import InFlightRequest
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.sequence import SequenceEntry


class SequenceBatch(Batch):
    """One request of each sequence."""

    has_slots = True
    __slots__ = ("num_padding", "rescheduled")

    def __init__(self, requests: list[InFlightRequest], enqueue_ns: list[int], taken_ns: int, num_padding: int) -> None:
        super().__init__(requests, enqueue_ns, len(requests), taken_ns)
        self.num_padding = num_padding
        self.rescheduled: list[InFlightRequest] = []

    @classmethod
    def packed(cls, entries: Sequence[SequenceEntry], taken_ns: int) -> SequenceBatch:
        """The entries in their order, one row each."""
        requests = [entry.request for entry in entries]
        return cls(requests, [entry.enqueue_ns for entry in entries], taken_ns, 0)

    @classmethod
    def slotted(cls, entries: Sequence[SequenceEntry], num_rows: int, taken_ns: int) -> SequenceBatch:
        """Each entry in the row of its slot, and padding in the rows of the others. There is at least one entry."""
        if len(entries) == num_rows:
            return cls.packed(entries, taken_ns)
        requests = [_padding(entries[0].request) for _ in range(num_rows)]
        enqueue_ns = [taken_ns] * num_rows
        for entry in entries:
            slot = entry.sequence.slot
            assert slot is not None, "what is executed has a slot"
            requests[slot.index] = entry.request
            enqueue_ns[slot.index] = entry.enqueue_ns
        return cls(requests, enqueue_ns, taken_ns, num_rows - len(entries))


def _padding(like: InFlightRequest) -> InFlightRequest:
    """A request with inputs of the same shapes, whose values mean nothing: the model is told that it is not ready."""
    return InFlightRequest(
        model_name=like.model_name, version=like.version, inputs=dict(like.inputs), rows=like.rows, is_padding=True
    )
