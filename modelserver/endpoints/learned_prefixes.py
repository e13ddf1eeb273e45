"""Who has seen which beginnings of prompts: replicas of a server, or instances of a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Final, Generic, Protocol, TypeVar

BLOCK_BYTES: Final = 256
MAX_BLOCKS: Final = 1024
# A learned match must be this many blocks longer than that of the place which is preferred otherwise.
_MIN_GAIN: Final = 4
# An entry takes about this much: a node of the ordered dict, two numbers.
_ENTRY_BYTES: Final = 256
_MAX_MARKS: Final = 1024


class Loaded(Hashable, Protocol):
    """A place that gets requests."""

    @property
    def load(self) -> float:
        """What it has to do: about the number of its requests."""


_Place = TypeVar("_Place", bound=Loaded)


def chained_blocks(scope: bytes, text: bytes) -> list[int]:
    """A hash for each whole block of a text, of all that comes before its end. Only texts of one scope share any."""
    chained = hash(scope)
    blocks = []
    for at in range(0, min(len(text), MAX_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES + 1, BLOCK_BYTES):
        chained = hash((chained, text[at : at + BLOCK_BYTES]))
        blocks.append(chained)
    return blocks


class LearnedPrefixes(Generic[_Place]):
    """Which places have seen which blocks of prompts. At most `max_bytes` of memory; the longest unused go first.

    Hashes and marks are this process's own: others learn for themselves.
    """

    def __init__(self, max_bytes: int = 8 << 20) -> None:
        self._max_entries = max_bytes // _ENTRY_BYTES
        # A bit for each place that has seen the block, by its chained hash.
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._marks: dict[_Place, int] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def better(self, blocks: Sequence[int], preferred: _Place, allowed: Collection[_Place]) -> _Place | None:
        """The least loaded of the allowed places that know most of the blocks, where they know enough more than
        the preferred one; else None."""
        if len(blocks) < _MIN_GAIN or not self._seen:
            return None
        own = self._marks.get(preferred, 0)
        mask = 0
        for each in allowed:
            mask |= self._marks.get(each, 0)
        length, own_length, best = 0, 0, 0
        for block in blocks:
            left = self._seen.get(block, 0) & (best or mask)
            if not left:
                break
            best = left
            length += 1
            if left & own and own_length == length - 1:
                own_length = length
        if not best or best & own or length - own_length < _MIN_GAIN:
            return None
        known = [each for each in allowed if self._marks.get(each, 0) & best]
        return min(known, key=lambda each: each.load)

    def learn(self, blocks: Sequence[int], place: _Place) -> None:
        """This place gets a prompt of these blocks."""
        if not blocks:
            return
        mark = self._marks.get(place)
        if mark is None:
            if len(self._marks) >= _MAX_MARKS:  # most of them are of places that have gone
                self._marks.clear()
                self._seen.clear()
            mark = self._marks[place] = 1 << len(self._marks)
        seen = self._seen
        # From the end, so that the first blocks are the last to be forgotten.
        for block in reversed(blocks):
            seen[block] = seen.get(block, 0) | mark
            seen.move_to_end(block)
        while len(seen) > self._max_entries:
            seen.popitem(last=False)
