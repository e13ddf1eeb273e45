"""Where the implicit state of one sequence is kept between its requests."""

from __future__ import annotations

from typing import Any

import numpy as np


class SequenceState:
    """State tensors by the name of the model's input; none before the first request was executed.

    Owned by the current holder of the sequence's one request: the scheduler, or the thread that executes it.
    """

    __slots__ = ("arrays",)

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the state tensors, in the order of the config; empty at the start of a sequence."""
        return tuple(array.shape for array in self.arrays.values())
