"""The deterministic automaton of a program, made as far as texts go into it.

A configuration is everything that may come next after some bytes: a set of places. A place is a state of the program
that reads a byte, and a node of the stack: where to go on after the rule, which is again a state and a node. Nodes of
the same content are the same node, and so are configurations of the same places: each has a number, and the table says
for each configuration and byte which one is next. A grammar that calls itself has configurations without end, so the
table may be renewed (`matcher`), which keeps only those in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .program import Program

# Configuration 0 has no place and is not complete: nothing can come of it.
DEAD = 0
_UNKNOWN = -1
# Places of a configuration, or a share of all states if that is more. A text with more ways to be read than this (as by
# (a|aa){9999}) goes on with some of them, each of which has an end. As many real alternatives take more states.
_MAX_PLACES = 1024
_PLACES_SHARE = 4
# Where the root rule returns to.
_DONE = (-1, 0)

Place = tuple[int, int]  # state, node


@dataclass(slots=True)
class Configuration:
    """`places` read a byte each; `is_complete`: the text may end here. `cuts`: bytes at which what follows changes."""

    places: tuple[Place, ...]
    is_complete: bool
    cuts: tuple[int, ...]


class Automaton:
    """Used from one thread at a time."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._closures: dict[int, tuple[int, ...]] = {}
        self._nodes: list[frozenset[Place]] = []
        self._node_numbers: dict[frozenset[Place], int] = {}
        self._max_places = max(_MAX_PLACES, len(program.states) // _PLACES_SHARE)
        self.configurations: list[Configuration] = []
        self._numbers: dict[tuple[tuple[Place, ...], bool], int] = {}
        self.table: npt.NDArray[np.int32] = np.full((64, 256), _UNKNOWN, dtype=np.int32)
        self._intern((), False)
        self.table[DEAD] = DEAD
        root = self._node(frozenset([_DONE]))
        rule = program.rules[0]
        closure = self._closure(rule.start)
        self.start = self._complete([(state, root) for state in closure], rule.end in closure)

    def next(self, number: int, byte: int) -> int:
        """The configuration after one more byte; DEAD if the byte is not allowed."""
        following = int(self.table[number, byte])
        return following if following >= 0 else self._fill(number, byte)

    def next_all(self, numbers: npt.NDArray[np.int32], bytes_: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The same for many at once."""
        while True:
            keys = numbers * 256 + bytes_
            following: npt.NDArray[np.int32] = self.table.reshape(-1)[keys]
            unknown = keys[following < 0]
            if not len(unknown):
                return following
            for key in np.unique(unknown).tolist():
                self.next(key // 256, key % 256)

    def adopt(self, other: Automaton, number: int) -> int:
        """The number here of a configuration of another automaton of the same program."""
        configuration = other.configurations[number]
        used: set[int] = set()
        waiting = [node for _, node in configuration.places]
        while waiting:
            node = waiting.pop()
            if node not in used:
                used.add(node)
                waiting.extend(parent for state, parent in other._nodes[node] if state >= 0)
        numbers: dict[int, int] = {}
        for node in sorted(used):  # a node is made after those it leads to
            numbers[node] = self._node(
                frozenset((state, numbers[parent] if state >= 0 else parent) for state, parent in other._nodes[node])
            )
        places = tuple(sorted((state, numbers[node]) for state, node in configuration.places))
        return self._intern(places, configuration.is_complete)

    def _fill(self, number: int, byte: int) -> int:
        """Find what follows, and note it for all bytes of which the same is true."""
        configuration = self.configurations[number]
        states = self.program.states
        reached: set[Place] = set()
        for state, node in configuration.places:
            for first, last, after in states[state].byte_edges:
                if first <= byte <= last:
                    reached.update((place, node) for place in self._closure(after))
        following = self._returned(reached)
        cuts = configuration.cuts
        place = int(np.searchsorted(cuts, byte, side="right"))
        self.table[number, cuts[place - 1] : cuts[place]] = following
        return following

    def _returned(self, reached: set[Place]) -> int:
        """Go on after every rule that ends here, and in rules that these ends complete."""
        final_rule_of = self.program.final_rule_of
        waiting, is_complete = list(reached), False
        while waiting:
            # What is left out would be more readings of the same text.
            if len(reached) > self._max_places and any(state not in final_rule_of for state, _ in reached):
                break
            state, node = waiting.pop()
            if state not in final_rule_of:
                continue
            for after, parent in self._nodes[node]:
                if after < 0:
                    is_complete = True
                    continue
                for place in self._closure(after):
                    if (place, parent) not in reached:
                        reached.add((place, parent))
                        waiting.append((place, parent))
        return self._complete(reached, is_complete)

    def _complete(self, reached: Iterable[Place], is_complete: bool) -> int:
        """The configuration of these places and of those in the rules that they call.

        All calls of a rule at this point share a node. Rules are taken by rank: those that call one are before it.
        """
        states, rules = self.program.states, self.program.rules
        places: set[Place] = set()
        callers: dict[int, set[Place]] = {}

        def take(state: int, node: int) -> None:
            if states[state].byte_edges:
                places.add((state, node))
            for number, after in states[state].calls:
                # A call at the end of a rule returns to where the rule does: the stack does not grow.
                if self._is_only_end(after):
                    callers.setdefault(number, set()).update(self._nodes[node])
                else:
                    callers.setdefault(number, set()).add((after, node))

        for state, node in reached:
            take(state, node)
        while callers:
            number = min(callers, key=lambda rule: rules[rule].rank)
            node = self._node(frozenset(self._some(callers.pop(number))))
            for state in self._closure(rules[number].start):
                take(state, node)
        return self._intern(tuple(sorted(self._some(places))), is_complete)

    def _some(self, places: set[Place]) -> Iterable[Place]:
        return places if len(places) <= self._max_places else sorted(places)[-self._max_places :]

    def _is_only_end(self, state: int) -> bool:
        closure = self._closure(state)
        return len(closure) == 1 and closure[0] in self.program.final_rule_of

    def _closure(self, state: int) -> tuple[int, ...]:
        """The states that are reached without a byte and that read one, call a rule or end one."""
        closure = self._closures.get(state)
        if closure is None:
            states, final_rule_of = self.program.states, self.program.final_rule_of
            reached, waiting = {state}, [state]
            while waiting:
                for after in states[waiting.pop()].free_edges:
                    if after not in reached:
                        reached.add(after)
                        waiting.append(after)
            closure = tuple(
                sorted(one for one in reached if states[one].byte_edges or states[one].calls or one in final_rule_of)
            )
            self._closures[state] = closure
        return closure

    def _node(self, content: frozenset[Place]) -> int:
        number = self._node_numbers.get(content)
        if number is None:
            number = self._node_numbers[content] = len(self._nodes)
            self._nodes.append(content)
        return number

    def _intern(self, places: tuple[Place, ...], is_complete: bool) -> int:
        number = self._numbers.get((places, is_complete))
        if number is not None:
            return number
        number = self._numbers[places, is_complete] = len(self.configurations)
        edges = [edge for state, _ in places for edge in self.program.states[state].byte_edges]
        cuts = sorted({0, 256, *(first for first, _, _ in edges), *(last + 1 for _, last, _ in edges)})
        self.configurations.append(Configuration(places, is_complete, tuple(cuts)))
        if number == len(self.table):
            self.table = np.concatenate([self.table, np.full_like(self.table, _UNKNOWN)])
        return number
