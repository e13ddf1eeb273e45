"""Sequences: requests with one correlation id, executed in order and one at a time; their slots and batches."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from modelserver.core.request import InFlightRequest, SequenceState
from modelserver.scheduling.batch import Batch
from modelserver.scheduling.queue import QueueEntry


class SequenceEnd(enum.Enum):
    """Why a sequence ended for the model."""

    END = "end"  # its last request was executed
    IDLE = "idle"  # no request came for max_sequence_idle_microseconds
    CANCELLED = "cancelled"  # a client cancelled one of its requests
    RESTARTED = "restarted"  # a START came before the END; the next request is the first of another sequence
    UNLOADED = "unloaded"  # the model is unloaded


# Called with the correlation id of a sequence that has ended for the instance, and the reason.
EndHook = Callable[[int | str, SequenceEnd], None]


class SequenceEntry(QueueEntry):
    """A queued request of a sequence; it keeps its place until it is answered."""

    __slots__ = ("sequence",)

    def __init__(self, request: InFlightRequest, enqueue_ns: int, sequence: LiveSequence) -> None:
        super().__init__(request, 1, enqueue_ns)
        self.sequence = sequence


class LiveSequence:
    """The waiting requests of one correlation id, and the one that a worker has.

    `key` finds the sequence for a further request: the id, except for iterative sequences, which have no further ones.
    `is_open` while more requests may come: the last one had no END. `has_begun` once the model has seen it.
    `end` is set when it ended while its request is still being executed. After an END, a START of the same id may
    wait in `entries`: those are of the next sequence.
    """

    __slots__ = (
        "correlation_id",
        "end",
        "entries",
        "has_begun",
        "idle_since_ns",
        "is_open",
        "key",
        "slot",
        "state",
        "taken",
    )

    def __init__(self, key: Hashable, correlation_id: int | str, *, has_state: bool) -> None:
        self.key = key
        self.correlation_id = correlation_id
        self.entries: deque[SequenceEntry] = deque()
        self.taken: SequenceEntry | None = None
        self.slot: SequenceSlot | None = None
        self.is_open = True
        self.has_begun = False
        self.end: SequenceEnd | None = None
        self.idle_since_ns = 0
        self.state = SequenceState() if has_state else None

    @property
    def head(self) -> SequenceEntry | None:
        """The request that may be executed next, if one may."""
        return self.entries[0] if self.entries and self.taken is None else None

    @property
    def is_idle(self) -> bool:
        """Whether it only waits for its client's next request."""
        return not self.entries and self.taken is None

    def segment(self, entry: SequenceEntry) -> list[SequenceEntry]:
        """The waiting requests of the same sequence as `entry`, which waits or is taken: from START to END."""
        entries = list(self.entries)
        position = 0 if entry is self.taken else entries.index(entry) + 1
        begin = position
        while begin > 0 and not entries[begin - 1].request.sequence_start:
            begin -= 1
        begin = max(0, begin - 1)
        end = position
        while end < len(entries) and not entries[end].request.sequence_start:
            end += 1
        return entries[begin:end]


class SequenceSlot:
    """One of the places that an instance has for sequences; with `direct` its index is the row in each batch."""

    __slots__ = ("index", "owner", "sequence")

    def __init__(self, owner: Hashable, index: int) -> None:
        self.owner = owner
        self.index = index
        self.sequence: LiveSequence | None = None


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
            assert slot is not None, "an executing sequence has a slot"
            requests[slot.index] = entry.request
            enqueue_ns[slot.index] = entry.enqueue_ns
        return cls(requests, enqueue_ns, taken_ns, num_rows - len(entries))


def _padding(like: InFlightRequest) -> InFlightRequest:
    """A request with inputs of the same shapes, whose values mean nothing: the model sees it as not ready."""
    return InFlightRequest(
        model_name=like.model_name, version=like.version, inputs=dict(like.inputs), rows=like.rows, is_padding=True
    )
