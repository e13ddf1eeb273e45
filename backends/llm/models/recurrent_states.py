"""The states of layers without attention for each sequence: of a recurrence, or the last inputs of a convolution.

One tensor for each of a layer's states, with a row for every slot; a sequence's rows are those of its slot while it
runs. Knows no network: who computes a step reads and writes through `StateGroup`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, repeat
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

    `is_fresh`: the sequences begin, and what their slots hold is others'. Only these may have unlike lengths. `kept`:
    where the one sequence's state is kept, so that its slot stays as it is; None: in its slot.
    """

    start: int
    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    is_fresh: bool
    kept: int | None = None

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

    A step that checks drafts keeps the state behind each of them in a spare slot. `accept` then makes one of these the
    sequence's own: slots are given out by numbers that stay, and where they lie changes.

    `groups` are those of the step that is being computed; the network sets them. `is_stepwise`: a sequence that goes on
    does so by one token at a time. `stacks_prompts`: chunks of several sequences are computed together.
    """

    def __init__(self, shapes: dict[StateKey, StateShape], device: torch.device) -> None:
        self._shapes = shapes
        self.device = device
        self._tensors: dict[StateKey, torch.Tensor] = {}
        self._num_slots = 0
        self._places: list[int] = []
        self._spare: list[int] = []
        # Of a slot whose sequence has drafts in the last step, where its spare slots begin.
        self._drafted: dict[int, int] = {}
        self.is_stepwise = False
        self.stacks_prompts = False
        self.groups: tuple[StateGroup, ...] = ()

    def num_bytes(self, num_slots: int, num_spare: int = 0) -> int:
        """The bytes that `allocate` takes."""
        return (num_slots + 1 + num_spare) * sum(shape.num_bytes for shape in self._shapes.values())

    def allocate(self, num_slots: int, num_spare: int = 0) -> None:
        """`num_spare`: the most drafts that a step checks."""
        self._num_slots = num_slots
        self._places = list(range(num_slots))
        self._spare = list(range(num_slots + 1, num_slots + 1 + num_spare))
        self._tensors = {
            key: torch.zeros((num_slots + 1 + num_spare, *shape.size), dtype=shape.dtype, device=self.device)
            for key, shape in self._shapes.items()
        }

    def group(
        self, slots: Sequence[int], batch: AttentionBatch, num_drafts: Sequence[int] = ()
    ) -> tuple[StateGroup, ...]:
        """The rows of a step of sequences in these slots; each continues from its state there.

        `num_drafts`: the last rows of each sequence that are drafts; empty where none has any. A sequence with drafts
        has one row before them.
        """
        starts = (batch.lens - batch.num_queries).tolist()
        rows = zip(slots, starts, batch.num_queries.tolist(), num_drafts or repeat(0), strict=False)
        groups: list[StateGroup] = []
        self._drafted.clear()
        num_spent = 0
        for has_drafts, part in groupby(rows, lambda row: row[3] > 0):
            row = groups[-1].stop if groups else 0
            if has_drafts:
                for slot, _, count, _ in part:
                    self._drafted[slot] = num_spent
                    place = self._places[slot]
                    groups.append(StateGroup(row, (1,), (place,), is_fresh=False))
                    for kept in self._spare[num_spent : num_spent + count - 1]:
                        row += 1
                        groups.append(StateGroup(row, (1,), (place,), is_fresh=False, kept=kept))
                        place = kept
                    num_spent += count - 1
                    row += 1
                continue
            own, begins, counts, _ = zip(*part, strict=True)
            found = group_rows(
                [self._places[slot] for slot in own],
                begins,
                counts,
                row=row,
                stacks_prompts=self.stacks_prompts,
                stacks_chunks=self.stacks_prompts and not self.is_stepwise,
            )
            groups += chain.from_iterable(map(_stepwise, found)) if self.is_stepwise else found
        assert num_spent <= len(self._spare), "a step checks more drafts than its states were allocated for"
        return tuple(groups)

    def accept(self, slot: int, num_drafts: int) -> None:
        """The sequence in this slot goes on behind the first `num_drafts` that the last step has checked."""
        if num_drafts:
            spare = self._drafted[slot] + num_drafts - 1
            self._places[slot], self._spare[spare] = self._spare[spare], self._places[slot]

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
    row: int = 0,
    stacks_prompts: bool = False,
    stacks_chunks: bool = False,
) -> list[StateGroup]:
    """Sequences in the order of their rows, from `row` on. Neighbours that add one token to what they have go together.
    So do those that begin and need little padding, with `stacks_prompts`, and those that go on by equally many tokens,
    with `stacks_chunks`.
    """
    groups: list[StateGroup] = []
    own: list[int] = []
    lengths: list[int] = []
    is_fresh = False

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
