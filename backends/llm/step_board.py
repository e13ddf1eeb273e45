"""Memory in which the ranks of one machine read the arrays of a step, which rank 0 has written."""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

import numpy as np

from .attention.paged import AttentionBatch, IntArray
from .block_tables import TableChange
from .rank_messages import GRAPH, STEP
from .step_inputs import StepInputs

# Of a step; at least one of them is not empty.
_NUM_ARRAYS = 11
NO_ROWS = np.empty(0, dtype=np.int64)
_NO_CHANGE = TableChange(NO_ROWS, NO_ROWS, NO_ROWS)


class WrittenStep(NamedTuple):
    """Of a `StepBoard`. `adapter_slots` and `adapter_bounds` are those of `StepInputs`."""

    input_ids: IntArray
    positions: IntArray
    batch: AttentionBatch
    adapter_slots: list[int]
    adapter_bounds: list[int]
    change: TableChange
    size: int


class StepBoard:
    """Memory for the arrays of one step, of a file without a name that all ranks have open."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: IntArray = np.empty(0, dtype=np.int64)

    def write(self, step: StepInputs, size: int, change: TableChange | None) -> bytes:
        """Put the step there; what the other ranks need to read it. `size` is what it is padded to in graphs in pieces,
        0 without graphs. With a `change` of tables on the device it needs no others."""
        batch = step.batch if change is None else step.batch_without_tables
        arrays = [
            step.input_ids,
            step.positions,
            batch.num_queries,
            batch.lens,
            batch.slots,
            batch.block_tables.reshape(-1),
            np.array(step.adapter_slots, dtype=np.int64),
            np.array(step.adapter_bounds, dtype=np.int64),
            *(change or _NO_CHANGE),
        ]
        self._put(arrays)
        sizes = [array.size for array in arrays]
        return STEP + np.array([batch.num_decodes, size, *sizes], dtype=np.int64).tobytes()

    def write_words(self, size: int, has_adapters: bool, words: IntArray) -> bytes:
        """The same of a step in a graph, see `CapturedDecode.follow`."""
        self._put([words])
        return GRAPH + np.array([size, has_adapters, len(words)], dtype=np.int64).tobytes()

    def carried(self, written: bytes) -> bytes:
        """What one of these returned, with the arrays behind it."""
        sizes = np.frombuffer(written[1:], dtype=np.int64)[2:]
        return written + self._memory[: sizes.sum()].tobytes()

    def read(self, written: bytearray) -> WrittenStep:
        """Views of the memory, or of what was carried."""
        numbers = np.frombuffer(written, dtype=np.int64)
        num_decodes, size, *sizes = numbers[: 2 + _NUM_ARRAYS].tolist()
        input_ids, positions, num_queries, lens, slots, tables, adapter_slots, bounds, *change = np.split(
            self._found(sum(sizes), numbers[2 + _NUM_ARRAYS :]), np.cumsum(sizes[:-1])
        )
        batch = AttentionBatch(num_decodes, num_queries, lens, tables.reshape(len(lens), -1), slots)
        return WrittenStep(
            input_ids, positions, batch, adapter_slots.tolist(), bounds.tolist(), TableChange(*change), size
        )

    def read_words(self, written: bytearray) -> tuple[int, bool, IntArray]:
        """What `write_words` got."""
        numbers = np.frombuffer(written, dtype=np.int64)
        size, has_adapters, count = numbers[:3].tolist()
        return size, bool(has_adapters), self._found(count, numbers[3:])

    def _put(self, arrays: list[IntArray]) -> None:
        size = sum(array.size for array in arrays)
        if size > len(self._memory):
            os.ftruncate(self._descriptor, 2 * 8 * size)
            self._map()
        np.concatenate(arrays, out=self._memory[:size])

    def _found(self, size: int, carried: IntArray) -> IntArray:
        if len(carried):
            return carried
        if size > len(self._memory):
            self._map()
        return self._memory[:size]

    def _map(self) -> None:
        """All of the file. Arrays that view what was mapped before keep it."""
        self._memory = np.frombuffer(mmap.mmap(self._descriptor, 0), dtype=np.int64)
