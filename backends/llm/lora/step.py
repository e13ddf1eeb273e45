"""Which rows of a step belong to which adapter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

# In place of a scheduler's slots, for texts that are embedded.
EMBEDDING_SLOT = -2


class StepAdapters:
    """The rows of one step by adapter: run `i` is rows `bounds[i]` to `bounds[i + 1]`, of the slot `slots[i]`.

    Rows without an adapter are in no run of `slots`, or in one of slot -1. `counts` int64 are the rows of each run.
    """

    def __init__(self, slots: Sequence[int], bounds: Sequence[int], version: int) -> None:
        self.slots = tuple(slots)
        self.bounds = tuple(bounds)
        self.counts = torch.tensor([stop - start for start, stop in pairwise(bounds)])
        # What layers have prepared of a step serves all that have equal keys.
        self.key = (version, self.slots)
