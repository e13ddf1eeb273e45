"""The parts of a request that do not travel in its message: tensors in shared memory, and outputs as classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from modelserver.core.datatype import Datatype


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """Bytes of a region that a client has registered under the name `region`."""

    region: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RegionInput:
    """An input whose elements lie in a region."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    place: RegionSlice


@dataclass(frozen=True, slots=True)
class Transfer:
    """Inputs that are in regions, and outputs that go there, by name; outputs wanted as classes, and how many.

    It is never changed: equal requests may share one.
    """

    inputs: tuple[RegionInput, ...] = ()
    placed: Mapping[str, RegionSlice] = field(default_factory=dict)
    class_counts: Mapping[str, int] = field(default_factory=dict)

    def without(self, items: Sequence[RegionInput]) -> Transfer | None:
        """What is left when these inputs were read; None if nothing is."""
        rest = Transfer(tuple(item for item in self.inputs if item not in items), self.placed, self.class_counts)
        return rest if rest.inputs or rest.placed or rest.class_counts else None
