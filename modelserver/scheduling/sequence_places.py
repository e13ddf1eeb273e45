"""Where sequences are: in the slots of instances, or in the backlog, waiting for one."""

from __future__ import annotations

from heapq import heappop, heappush

from modelserver.core.request import InFlightRequest
from modelserver.scheduling.backlog import Backlog, FairBacklog
from modelserver.scheduling.instance_slots import InstanceSlots
from modelserver.scheduling.sequence import LiveSequence, SequenceSlot


class SequencePlaces:
    """Every call is made under the batcher's lock. `is_fair`: callers share slots by weight.

    `num_released` counts the slots that became free, until somebody looks and sets it back.
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
        """The sequence leaves its slot. Somebody calls `refill` for that."""
        slot = sequence.slot
        assert slot is not None, "it has one"
        sequence.slot = slot.sequence = None
        owner_of(slot).num_sequences -= 1

    def refill(self, slot: SequenceSlot) -> LiveSequence | None:
        """A slot of an instance that stays is free: the sequence that is next gets it, if any."""
        self.num_released += 1
        if not self.backlog:
            heappush(self._free, (slot.index, owner_of(slot).number, slot))
            return None
        sequence = self.backlog.pop()
        _bind(sequence, slot)
        return sequence

    def check_integrity(self) -> None:
        """Assert that nobody waits in vain. For tests."""
        has_free = any(not owner_of(slot).is_closed and slot.sequence is None for _, _, slot in self._free)
        assert not (has_free and self.backlog), "sequences wait beside free slots"


def owner_of(slot: SequenceSlot) -> InstanceSlots:
    """The instance that the slot is of."""
    owner = slot.owner
    assert isinstance(owner, InstanceSlots), "slots belong to instances"
    return owner


def _bind(sequence: LiveSequence, slot: SequenceSlot) -> None:
    slot.sequence, sequence.slot = sequence, slot
    owner_of(slot).num_sequences += 1
