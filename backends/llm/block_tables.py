"""The blocks of running sequences as one array, which is kept from step to step: a step writes only what is new."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import torch

from .attention.kv_blocks import KvBlocks
from .attention.paged import AttentionBatch, IntArray, copied_together
from .cuda_graphs import can_capture
from .sequence import Sequence as TokenSequence

_BLOCK_IDS = attrgetter("block_ids")


class BlockTables:
    """`rows` [slots, blocks]: by the slot of a sequence its first `counts` [slots] blocks, then zeros.

    `versions` [slots] change when the blocks that a row began with are others: another sequence has its slot, or the
    same one has lost its blocks meanwhile. `is_windowed`: blocks before a window become `NULL_BLOCK`, so a row that
    grows is another.
    """

    def __init__(self, *, is_windowed: bool = False) -> None:
        self.rows = np.zeros((1, 1), dtype=np.int64)
        self.counts = np.zeros(1, dtype=np.int64)
        self.versions = np.zeros(1, dtype=np.int64)
        self._is_windowed = is_windowed
        self._held: list[array[int] | None] = [None]
        # Of the step before: its sequences' blocks and slots.
        self._last: list[array[int]] = []
        self._last_slots = np.empty(0, dtype=np.int64)

    def take(self, sequences: Sequence[TokenSequence], num_blocks: IntArray) -> IntArray:
        """Write the blocks of a step's sequences, which have different slots: at least as many as `num_blocks` of each.
        These slots, in their order."""
        return self._take(sequences, num_blocks, None)

    def take_apart(self, sequences: Sequence[TokenSequence], num_blocks: IntArray) -> IntArray:
        """The same of sequences that may have no slots of their own: each has the row of its place."""
        return self._take(sequences, num_blocks, list(range(len(sequences))))

    def _take(self, sequences: Sequence[TokenSequence], num_blocks: IntArray, slots: list[int] | None) -> IntArray:
        tables = list(map(_BLOCK_IDS, sequences))
        if len(tables) != len(self._last) or not all(map(is_, tables, self._last)):
            if slots is None:
                slots = [sequence.slot for sequence in sequences]
            self._make_room(max(slots) + 1, 0)
            for slot, table in zip(slots, tables, strict=True):
                if self._held[slot] is not table:
                    self._held[slot] = table
                    self.counts[slot] = 0
                    self.versions[slot] += 1
            self._last, self._last_slots = tables, np.array(slots, dtype=np.int64)
        found = self._last_slots
        for index in np.flatnonzero(self.counts[found] < num_blocks).tolist():
            self._write(int(found[index]), tables[index])
        return found

    def _write(self, slot: int, table: array[int]) -> None:
        """All of a table, which has grown or is another."""
        first, count = int(self.counts[slot]), len(table)
        self._make_room(0, count)
        if first == 0:
            self.rows[slot, count:] = 0
        elif self._is_windowed:
            first = 0
            self.versions[slot] += 1
        self.rows[slot, first:count] = table[first:]
        self.counts[slot] = count

    def _make_room(self, num_slots: int, num_blocks: int) -> None:
        old_slots, old_blocks = self.rows.shape
        if num_slots <= old_slots and num_blocks <= old_blocks:
            return
        slots, blocks = (
            max(old, 2 * new if new > old else 0) for old, new in ((old_slots, num_slots), (old_blocks, num_blocks))
        )
        rows, self.rows = self.rows, np.zeros((slots, blocks), dtype=np.int64)
        self.rows[:old_slots, :old_blocks] = rows
        for name in ("counts", "versions"):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(slots - old_slots, dtype=np.int64))))
        self._held += [None] * (slots - old_slots)


class TableChange(NamedTuple):
    """What a step adds to `DeviceTables`: the `rows` of its sequences there, and `blocks` for `places`, which count
    through all rows, one after the other."""

    rows: IntArray
    places: IntArray
    blocks: IntArray


class DeviceTables:
    """A copy of `BlockTables` on a device, in which a step changes what is new. `rows` int32 [slots + 1, width]: the
    blocks of each slot; the last row is that of padding."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        self.rows = torch.zeros(num_slots + 1, width, dtype=torch.int32, device=device)
        self._width = width
        self._counts = np.zeros(num_slots, dtype=np.int64)
        self._versions = np.full(num_slots, -1, dtype=np.int64)

    def take(self, tables: BlockTables, slots: IntArray) -> TableChange:
        """What the rows `slots` lack; `change` must get it before any step that is taken later."""
        versions, counts = tables.versions[slots], tables.counts[slots]
        known = np.where(self._versions[slots] == versions, self._counts[slots], 0)
        changed = np.flatnonzero(known < counts)
        if not len(changed):
            return TableChange(slots, _NONE, _NONE)
        own, known, counts = slots[changed], known[changed], counts[changed]
        self._versions[own], self._counts[own] = versions[changed], counts
        lens = counts - known
        rows = np.repeat(own, lens)
        columns = np.arange(len(rows)) + np.repeat(known - (np.cumsum(lens) - lens), lens)
        return TableChange(slots, rows * self._width + columns, tables.rows[rows, columns])

    def change(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Of a `TableChange`, on the device."""
        if len(places):
            self.rows.view(-1)[places] = blocks.to(torch.int32)


_NONE = np.empty(0, dtype=np.int64)


def device_tables(attention: Any, blocks: KvBlocks, max_num_seqs: int, max_model_len: int) -> DeviceTables | None:
    """Of an engine whose sequences have slots below `max_num_seqs`; None where attention takes tables from the host."""
    if not can_capture(blocks.device) or not hasattr(attention, "arrays_of"):
        return None
    return DeviceTables(max_num_seqs, -(-max_model_len // blocks.block_size), blocks.device)


def bring_step(
    attention: Any,
    batch: AttentionBatch,
    arrays: Sequence[IntArray],
    device: torch.device,
    tables: DeviceTables | None,
    change: TableChange | None,
) -> tuple[Any, list[torch.Tensor]]:
    """A step as `attention` takes it, and other arrays on the device, flat. With `tables` one copy brings all of it,
    and the batch's own tables are not read."""
    if tables is None or change is None:
        return attention.prepare(batch), copied_together(arrays, device)
    first = len(arrays)
    copied = copied_together([*arrays, *change, *attention.arrays_of(batch)], device)
    rows, places, blocks = copied[first : first + 3]
    tables.change(places, blocks)
    inputs = attention.inputs_of(batch.num_decodes, tables.rows[rows], copied[first + 3 :])
    return inputs, copied[:first]
