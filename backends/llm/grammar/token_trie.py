"""A vocabulary as a trie over bytes, in arrays, so that all tokens are put through an automaton level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .automaton import DEAD, Automaton

# Looking at all nodes of a level is cheaper than picking those that are alive, if that many are.
_MOST_ALIVE = 0.25

# No text has the others.
_BYTES_OF_UTF8 = frozenset([*range(0xC0), *range(0xC2, 0xF5)])

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes of one depth, ordered by parent: `byte` leads from `parent` (an index of the level before) to each.

    The children of node p are `child_start[p]` up to `child_start[p + 1]`, indices of the level after.
    `token_ids[i]` ends at node `token_nodes[i]`.
    """

    parent: Ints
    byte: Ints
    child_start: Ints
    token_ids: Ints
    token_nodes: Ints


class TokenTrie:
    """`vocabulary[token_id]` are the token's bytes; tokens without any are not in it, and never allowed."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self.vocabulary = tuple(vocabulary)
        self._levels = _make_levels(self.vocabulary)
        # Whether every text can be written, byte by byte if need be.
        lone = {token[0] for token in self.vocabulary if len(token) == 1}
        self.is_byte_complete = lone.issuperset(_BYTES_OF_UTF8)

    def allowed(self, automaton: Automaton, number: int) -> npt.NDArray[np.bool_]:
        """Which tokens may come next [vocabulary]: those whose bytes lead from a configuration to one that lives."""
        allowed = np.zeros(len(self.vocabulary), dtype=np.bool_)
        alive = np.zeros(1, dtype=np.int32)
        numbers = np.full(1, number, dtype=np.int32)
        for above, level in zip(self._levels, self._levels[1:], strict=False):
            if len(alive) > _MOST_ALIVE * (len(above.child_start) - 1):
                nodes, numbers = self._all_children(above, level, alive, numbers)
            else:
                nodes, numbers = self._children(above, alive, numbers)
            following = automaton.next_all(numbers, level.byte[nodes])
            kept = np.flatnonzero(following != DEAD)
            if not len(kept):
                break
            alive, numbers = nodes[kept], following[kept]
            is_alive = np.zeros(len(level.parent), dtype=np.bool_)
            is_alive[alive] = True
            allowed[level.token_ids[is_alive[level.token_nodes]]] = True
        return allowed

    @staticmethod
    def _all_children(above: _Level, level: _Level, alive: Ints, numbers: Ints) -> tuple[Ints, Ints]:
        of_node = np.full(len(above.child_start) - 1, DEAD, dtype=np.int32)
        of_node[alive] = numbers
        return np.arange(len(level.parent), dtype=np.int32), of_node[level.parent]

    @staticmethod
    def _children(above: _Level, alive: Ints, numbers: Ints) -> tuple[Ints, Ints]:
        starts = above.child_start[alive]
        counts = above.child_start[alive + 1] - starts
        ends = np.cumsum(counts)
        within = np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - counts, counts)
        return (np.repeat(starts, counts) + within).astype(np.int32), np.repeat(numbers, counts)


def _make_levels(vocabulary: tuple[bytes, ...]) -> list[_Level]:
    """The root's level and one for each byte of the longest token."""
    ids = np.array([token_id for token_id, token in enumerate(vocabulary) if token], dtype=np.int32)
    lengths = np.array([len(vocabulary[token_id]) for token_id in ids], dtype=np.int64)
    text = np.frombuffer(b"".join(vocabulary[token_id] for token_id in ids), dtype=np.uint8)
    starts = np.cumsum(lengths) - lengths
    none = np.zeros(0, dtype=np.int32)
    parents, bytes_, ends = [none], [none], [(none, none)]
    nodes = np.zeros(len(ids), dtype=np.int64)  # where each token is at this depth
    for depth in range(int(lengths.max(initial=0))):
        longer = lengths > depth
        ids, lengths, starts, nodes = ids[longer], lengths[longer], starts[longer], nodes[longer]
        keys, nodes = np.unique(nodes * 256 + text[starts + depth], return_inverse=True)
        parents.append((keys // 256).astype(np.int32))
        bytes_.append((keys % 256).astype(np.int32))
        is_end = lengths == depth + 1
        ends.append((ids[is_end], nodes[is_end].astype(np.int32)))
    levels = []
    for depth, (parent, byte, (token_ids, token_nodes)) in enumerate(zip(parents, bytes_, ends, strict=True)):
        num_nodes = max(1, len(parent)) if depth == 0 else len(parent)
        below = parents[depth + 1] if depth + 1 < len(parents) else none
        child_start = np.searchsorted(below, np.arange(num_nodes + 1)).astype(np.int32)
        levels.append(_Level(parent, byte, child_start, token_ids, token_nodes))
    return levels
