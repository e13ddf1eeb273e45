"""The states of layers without attention for each sequence: of a recurrence, or the last inputs of a convolution.

One tensor for each of a layer's states, with a row for every slot; a sequence's rows are those of its slot while it
runs. Knows no network: who computes a step reads and writes through `StateGroup`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from ..attention.paged import AttentionBatch


class StateKey(NamedTuple):
    """`kind` is "conv" or "recurrent"; a layer may have several of one kind."""

    kind: str
    layer: int
    place: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """Of one sequence."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        item: int = self.dtype.itemsize
        return math.prod(self.size) * item


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Rows [start, stop) of a step: tokens of one sequence in their order, or one token each of those in `slots`.

    `is_fresh`: a sequence begins, and what its slot holds is another's.
    """

    start: int
    stop: int
    slots: tuple[int, ...]
    is_fresh: bool

    @property
    def is_stacked(self) -> bool:
        return len(self.slots) > 1


class RecurrentStates:
    """Of all layers; without memory before `allocate`. One slot more than asked for is for `group_alone`.

    `groups` are those of the step that is being computed; the network sets them. `is_stepwise`: a sequence that goes on
    does so by one token at a time.
    """

    def __init__(self, shapes: dict[StateKey, StateShape], device: torch.device) -> None:
        self._shapes = shapes
        self._device = device
        self._tensors: dict[StateKey, torch.Tensor] = {}
        self._num_slots = 0
        self.is_stepwise = False
        self.groups: tuple[StateGroup, ...] = ()

    def num_bytes(self, num_slots: int) -> int:
        """The bytes that `allocate` takes."""
        return (num_slots + 1) * sum(shape.num_bytes for shape in self._shapes.values())

    def allocate(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._tensors = {
            key: torch.zeros((num_slots + 1, *shape.size), dtype=shape.dtype, device=self._device)
            for key, shape in self._shapes.items()
        }

    def group(self, slots: Sequence[int], batch: AttentionBatch) -> tuple[StateGroup, ...]:
        """The rows of a step of sequences in these slots; each continues from its state there."""
        starts = (batch.lens - batch.num_queries).tolist()
        groups = group_rows(slots, starts, batch.num_queries.tolist())
        return tuple(chain.from_iterable(map(_stepwise, groups)) if self.is_stepwise else groups)

    def group_alone(self, num_tokens: int) -> tuple[StateGroup, ...]:
        """One sequence that is computed as a whole, without keeping its state."""
        return (StateGroup(0, num_tokens, (self._num_slots,), is_fresh=True),)

    def tensor(self, key: StateKey) -> torch.Tensor:
        """[slots + 1, ...]"""
        return self._tensors[key]


def group_rows(slots: Iterable[int], starts: Iterable[int], num_queries: Iterable[int]) -> list[StateGroup]:
    """Sequences in the order of their rows. Those that add one token to what they have come first, and go together."""
    groups: list[StateGroup] = []
    stacked: list[int] = []
    row = 0
    for slot, start, count in zip(slots, starts, num_queries, strict=True):
        if start and count == 1 and len(stacked) == row:
            stacked.append(slot)
        else:
            groups.append(StateGroup(row, row + count, (slot,), is_fresh=start == 0))
        row += count
    return [StateGroup(0, len(stacked), tuple(stacked), is_fresh=False), *groups] if stacked else groups


def _stepwise(group: StateGroup) -> list[StateGroup]:
    if group.is_fresh or group.is_stacked:
        return [group]
    return [StateGroup(row, row + 1, group.slots, is_fresh=False) for row in range(group.start, group.stop)]
