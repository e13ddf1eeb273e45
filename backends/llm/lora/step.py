"""Which rows of a step belong to which adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..attention.paged import IntArray

# In place of a scheduler's slots, for texts that are embedded.
EMBEDDING_SLOT = -2
# Rows of one adapter that a program of the kernels in Triton has, in steps of few rows and of many.
TILE_ROWS = 16
_MANY_ROWS, _LONG_TILE_ROWS = 64, 64


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Rows of a step by adapter, for kernels in Triton.

    `table` int32 [tiles, 3] on the device: of each tile its slot as `device_slot` numbers it, its first row, and the
    row behind its last, which are at most `num_rows`. A tile of slot -1 has nothing.
    """

    table: torch.Tensor
    num_rows: int


class StepAdapters:
    """The rows of one step by adapter: run `i` is rows `bounds[i]` to `bounds[i + 1]`, of the slot `slots[i]`.

    Rows without an adapter are in no run of `slots`, or in one of slot -1. `bounds_address` is that of the bounds in
    int64, for kernels. `has_gains`: an adapter of the step is one of DoRA.
    """

    def __init__(
        self,
        slots: Sequence[int],
        bounds: Sequence[int],
        version: int,
        *,
        device: torch.device,
        has_gains: bool,
        has_tiles: bool = False,
    ) -> None:
        """`has_tiles`: layers read `tiles`."""
        self.slots = tuple(slots)
        self.bounds = tuple(bounds)
        self.has_gains = has_gains
        self.has_tiles = has_tiles
        self._device = device
        self._bounds = torch.tensor(self.bounds)
        self.bounds_address = self._bounds.data_ptr()
        # What layers have prepared of a step serves all that have equal keys.
        self.key = (version, self.slots)

    @cached_property
    def tiles(self) -> RowTiles:
        """Made when the first layer asks, unless `put` has got them."""
        num_rows = tile_rows(self.bounds[-1])
        table = torch.from_numpy(tile_table(self.slots, self.bounds, num_rows))
        if self._device.type == "cuda":
            table = table.pin_memory()
        return RowTiles(table.to(self._device, non_blocking=True), num_rows)

    def words(self, num_rows: int = 0, num_tiles: int = 0) -> IntArray:
        """What layers read of the tiles, for `put`. Of a step that is padded to `num_rows` with `num_tiles` tiles."""
        if not self.has_tiles:
            return np.empty(0, dtype=np.int64)
        table = tile_table(self.slots, self.bounds, tile_rows(num_rows or self.bounds[-1]))
        words = np.full(-(-3 * max(num_tiles, len(table)) // 2), -1, dtype=np.int64)
        words.view(np.int32)[: table.size] = table.reshape(-1)
        return words

    def put(self, words: torch.Tensor) -> None:
        """The same on the device."""
        if len(words):
            self.tiles = RowTiles(tiles_in(words), tile_rows(self.bounds[-1]))


class CapturedAdapters(StepAdapters):
    """Of steps that are graphs: the tiles, of `num_rows`, are filled anew before each, and no layer reads anything
    else."""

    def __init__(self, table: torch.Tensor, num_rows: int = TILE_ROWS) -> None:
        super().__init__((), (0,), 0, device=table.device, has_gains=False)
        self.tiles = RowTiles(table, num_rows)


def tile_rows(num_rows: int) -> int:
    """Of the tiles of a step of any kind."""
    return _LONG_TILE_ROWS if num_rows > _MANY_ROWS else TILE_ROWS


def tile_table(slots: Sequence[int], bounds: Sequence[int], num_rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The table of `RowTiles`, without tiles that have nothing."""
    tiles = [
        (device_slot(slot), first, min(first + num_rows, bounds[run + 1]))
        for run, slot in enumerate(slots)
        if slot != -1
        for first in range(bounds[run], bounds[run + 1], num_rows)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 3)


def tiles_in(words: torch.Tensor) -> torch.Tensor:
    """The table that `StepAdapters.words` made."""
    numbers = words.view(torch.int32)
    return numbers[: len(numbers) // 3 * 3].view(-1, 3)


def most_tiles(num_rows: int, num_slots: int, rows_of_tile: int = TILE_ROWS, num_runs: int = 1) -> int:
    """Of steps with this many rows and adapters, each of whose rows lie side by side, in `num_runs` places."""
    return min(num_rows, num_rows // rows_of_tile + num_runs * num_slots)


def device_slot(slot: int) -> int:
    """The place of a slot among those on a device, of which the first is that of what is embedded."""
    return 0 if slot == EMBEDDING_SLOT else slot + 1
