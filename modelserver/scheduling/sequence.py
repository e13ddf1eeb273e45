"""A sequence: requests with one correlation id, executed in order and one at a time; and the slot that it holds."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable

from modelserver.core.request import InFlightRequest
from modelserver.core.sequence_state import SequenceState
from modelserver.scheduling.queue import QueueEntry


class SequenceEnd(enum.Enum):
    """Why the model sees no more of a sequence."""

    END = "end"  # its last request was executed
    IDLE = "idle"  # no request came for max_sequence_idle_microseconds
    CANCELLED = "cancelled"  # a client gave up one of its requests
    RESTARTED = "restarted"  # a START came before the END; the next request is the first of another sequence
    UNLOADED = "unloaded"  # the model goes


# Called with the correlation id and the reason of a sequence of which the instance sees no more.
EndHook = Callable[[int | str, SequenceEnd], None]


class SequenceEntry(QueueEntry):
    """A queued request of a sequence; it keeps its place until it is answered."""

    __slots__ = ("sequence",)

    def __init__(self, request: InFlightRequest, enqueue_ns: int, sequence: LiveSequence) -> None:
        super().__init__(request, 1, enqueue_ns)
        self.sequence = sequence


class LiveSequence:
    """Requests of one correlation id that wait, and the one that a worker has.

    `key` is what a further request is found by: the id, but for iterative ones, which have no further requests.
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
        """Whether it only waits for its client."""
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
