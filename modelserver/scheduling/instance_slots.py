"""What one instance has of the sequences of its model: its slots, and the requests in its worker's hands."""

from __future__ import annotations

from modelserver.scheduling.queue import RequestQueue
from modelserver.scheduling.sequence import SequenceEnd, SequenceEntry, SequenceSlot
from modelserver.scheduling.sequence_rules import SequenceRules


class InstanceSlots:
    """The sequences of one instance. `taken` are the requests that its worker has.

    `ended` are sequences that the instance is to be told about, unless it does not want to be (`hears_ends`).
    `is_closed`: no further sequence comes here.
    """

    def __init__(self, rules: SequenceRules, number: int, *, hears_ends: bool) -> None:
        self.number = number
        self.hears_ends = hears_ends
        self.slots = [SequenceSlot(self, index) for index in range(rules.num_slots)]
        self.num_sequences = 0
        self.taken: list[SequenceEntry] = []
        self.ended: list[tuple[int | str, SequenceEnd]] = []
        self.is_closed = False
        oldest = rules.oldest
        self.queue = (
            None
            if oldest is None
            else RequestQueue(
                max_rows=oldest.max_rows, ripe_rows=oldest.preferred_rows[0], keep_order=oldest.keep_order
            )
        )
