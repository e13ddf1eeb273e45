"""Which adapters are in the slots of a device, and which sequences hold them there."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .adapter import Adapter


class AdapterSlots:
    """A slot is held by the sequences that run with its adapter; of slots that none holds, the longest unused is given
    away first. Pure: no device. Only the engine's thread calls it; `running` and `waiting` count sequences by the names
    of their adapters, and may be read from any thread.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.running: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self._num_holders = [0] * num_slots
        # Slots that nothing holds, the longest unused first, each with what is left in it.
        self._unused: OrderedDict[int, Adapter | None] = OrderedDict.fromkeys(range(num_slots))
        self._used: dict[int, Adapter] = {}

    def can_acquire(self, adapter: Adapter) -> bool:
        """Whether `acquire` finds a slot now."""
        return bool(self._unused) or self._slot_of(adapter) is not None

    def acquire(self, adapter: Adapter) -> int:
        """A slot for one more sequence, to be released once."""
        slot = self._slot_of(adapter)
        if slot is None:
            slot = next((slot for slot, left in self._unused.items() if left is adapter), None)
        if slot is None:
            slot = next(iter(self._unused))
        self._unused.pop(slot, None)
        self._used[slot] = adapter
        self._num_holders[slot] += 1
        self.running[adapter.name] += 1
        return slot

    def release(self, slot: int) -> None:
        self._num_holders[slot] -= 1
        _take_one(self.running, self._used[slot].name)
        if not self._num_holders[slot]:
            self._unused[slot] = self._used.pop(slot)

    def await_turn(self, adapter: Adapter) -> None:
        """Count a sequence that waits from now on."""
        self.waiting[adapter.name] += 1

    def end_waiting(self, adapter: Adapter) -> None:
        _take_one(self.waiting, adapter.name)

    def _slot_of(self, adapter: Adapter) -> int | None:
        return next((slot for slot, each in self._used.items() if each is adapter), None)


def _take_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
