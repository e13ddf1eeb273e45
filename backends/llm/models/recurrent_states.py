"""The states of layers without attention for each sequence: of a recurrence, or the last inputs of a convolution.

One tensor for each of a layer's states, with a row for every slot; a sequence's rows are those of its slot while it
runs. Knows no network: who computes a step reads and writes through `StateGroup`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
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


# Rows of a stack of prompts may be this many times its tokens: the rest is padding before the shorter ones.
_MOST_PADDED = 1.5


@dataclass(frozen=True)
class StateGroup:
    """Rows of a step from `start` on: the tokens of the sequences in `slots`, of which each has some of `lengths`.

    `is_fresh`: the sequences begin, and what their slots hold is others'. Only these may have unlike lengths.
    """

    start: int
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    is_fresh: bool

    @cached_property
    def stop(self) -> int:
        return self.start + sum(self.lengths)

    @property
    def is_stacked(self) -> bool:
        return len(self.slots) > 1

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def is_padded(self) -> bool:
        return min(self.lengths) < self.longest

    @cached_property
    def places(self) -> torch.Tensor:
        """Of each row, where it is among [sequences * longest], with padding before the shorter ones."""
        width = self.longest
        return torch.cat(
            [
                torch.arange((number + 1) * width - length, (number + 1) * width)
                for number, length in enumerate(self.lengths)
            ]
        )


class RecurrentStates:
    """Of all layers; without memory before `allocate`. One slot more than asked for is for `group_alone`.

    `groups` are those of the step that is being computed; the network sets them. `is_stepwise`: a sequence that goes on
    does so by one token at a time. `stacks_prompts`: chunks of several sequences are computed together.
    """

    def __init__(self, shapes: dict[StateKey, StateShape], device: torch.device) -> None:
        self._shapes = shapes
        self.device = device
        self._tensors: dict[StateKey, torch.Tensor] = {}
        self._num_slots = 0
        self.is_stepwise = False
        self.stacks_prompts = False
        self.groups: tuple[StateGroup, ...] = ()

    def num_bytes(self, num_slots: int) -> int:
        """The bytes that `allocate` takes."""
        return (num_slots + 1) * sum(shape.num_bytes for shape in self._shapes.values())

    def allocate(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._tensors = {
            key: torch.zeros((num_slots + 1, *shape.size), dtype=shape.dtype, device=self.device)
            for key, shape in self._shapes.items()
        }

    def group(self, slots: Sequence[int], batch: AttentionBatch) -> tuple[StateGroup, ...]:
        """The rows of a step of sequences in these slots; each continues from its state there."""
        starts = (batch.lens - batch.num_queries).tolist()
        groups = group_rows(
            slots,
            starts,
            batch.num_queries.tolist(),
            stacks_prompts=self.stacks_prompts,
            stacks_chunks=self.stacks_prompts and not self.is_stepwise,
        )
        return tuple(chain.from_iterable(map(_stepwise, groups)) if self.is_stepwise else groups)

    def group_alone(self, num_tokens: int) -> tuple[StateGroup, ...]:
        """One sequence that is computed as a whole, without keeping its state."""
        return (StateGroup(0, (num_tokens,), (self._num_slots,), is_fresh=True),)

    def tensor(self, key: StateKey) -> torch.Tensor:
        """[slots + 1, ...]"""
        return self._tensors[key]


def group_rows(
    slots: Iterable[int],
    starts: Iterable[int],
    num_queries: Iterable[int],
    *,
    stacks_prompts: bool = False,
    stacks_chunks: bool = False,
) -> list[StateGroup]:
    """Sequences in the order of their rows. Neighbours that add one token to what they have go together. So do those
    that begin and need little padding, with `stacks_prompts`, and those that go on by equally many tokens, with
    `stacks_chunks`.
    """
    groups: list[StateGroup] = []
    own: list[int] = []
    lengths: list[int] = []
    row, is_fresh = 0, False

    def close() -> None:
        if own:
            groups.append(StateGroup(row - sum(lengths), tuple(lengths), tuple(own), is_fresh=is_fresh))
            own.clear()
            lengths.clear()

    for slot, start, count in zip(slots, starts, num_queries, strict=True):
        joins = bool(own) and is_fresh == (start == 0)
        if joins and is_fresh:
            rows = (len(own) + 1) * max(count, *lengths)
            joins = stacks_prompts and rows <= _MOST_PADDED * (sum(lengths) + count)
        elif joins:
            joins = count == lengths[0] and (count == 1 or stacks_chunks)
        if not joins:
            close()
            is_fresh = start == 0
        own.append(slot)
        lengths.append(count)
        row += count
    close()
    return groups


def _stepwise(group: StateGroup) -> list[StateGroup]:
    if group.is_fresh or group.longest == 1:
        return [group]
    return [StateGroup(row, (1,), group.slots, is_fresh=False) for row in range(group.start, group.stop)]
