"""Which rows of a step belong to which adapter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# In place of a scheduler's slots, for texts that are embedded.
EMBEDDING_SLOT = -2


class StepAdapters:
    """The rows of one step by adapter: run `i` is rows `bounds[i]` to `bounds[i + 1]`, of the slot `slots[i]`.

    Rows without an adapter are in no run of `slots`, or in one of slot -1. `bounds_address` is that of the bounds in
    int64, for kernels.
    """

    def __init__(self, slots: Sequence[int], bounds: Sequence[int], version: int) -> None:
        self.slots = tuple(slots)
        self.bounds = tuple(bounds)
        self._bounds = torch.tensor(self.bounds)
        self.bounds_address = self._bounds.data_ptr()
        # What layers have prepared of a step serves all that have equal keys.
        self.key = (version, self.slots)
