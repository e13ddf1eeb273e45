"""Regular expressions that must all match, and others that must not: one deterministic automaton over characters.

Intersection and complement are not expressions, so each state of the automaton becomes a rule: a character, and the
rule of the state after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from modelserver.backend import InvalidArgumentError

from .character_sets import Writer
from .expression import (
    EMPTY,
    LAST_CHARACTER,
    NEVER,
    Characters,
    Choice,
    Concat,
    Expression,
    Literal,
    Ref,
    Repeat,
    choice,
    concat,
    normalized,
)
from .pace import Pace

# Of each expression before, and of what all of them come to together.
_MAX_PARTS = 10_000
_MAX_STATES = 2_000

States = frozenset[int]


class CharacterAutomaton:
    """One expression without rules whose leaves are characters, nondeterministic. State 0 is the end."""

    def __init__(self, expression: Expression) -> None:
        self._edges: list[list[tuple[int, int, int]]] = [[]]  # first and last character, state after it
        self._free: list[list[int]] = [[]]
        self.start = self._closure([self._add(expression, 0)])

    @staticmethod
    def is_end(states: States) -> bool:
        return 0 in states

    def matches(self, text: str) -> bool:
        states = self.start
        for character in text:
            states = self.after(states, ord(character))
        return self.is_end(states)

    def after(self, states: States, code: int) -> States:
        return self._closure(
            target for state in states for low, high, target in self._edges[state] if low <= code <= high
        )

    def cuts(self, states: States) -> set[int]:
        """Characters at which what follows changes."""
        return {cut for state in states for low, high, _ in self._edges[state] for cut in (low, high + 1)}

    def _add(self, expression: Expression, end: int) -> int:
        """A state from which the expression leads to `end`."""
        if isinstance(expression, Characters):
            start = self._new_state()
            self._edges[start] = [(low, high, end) for low, high in expression.ranges]
            return start
        if isinstance(expression, Literal):
            for character in reversed(expression.text.decode()):
                end = self._add(Characters(((ord(character), ord(character)),)), end)
            return end
        if isinstance(expression, Concat):
            for part in reversed(expression.parts):
                end = self._add(part, end)
            return end
        if isinstance(expression, Choice):
            start = self._new_state()
            self._free[start] = [self._add(option, end) for option in expression.options]
            return start
        assert isinstance(expression, Repeat), f"{expression} is no expression of characters"
        return self._add_repeat(expression, end)

    def _add_repeat(self, repeat: Repeat, end: int) -> int:
        start = end
        if repeat.most is None:
            start = self._new_state()
            self._free[start] = [end, self._add(repeat.part, start)]
        else:
            for _ in range(repeat.most - repeat.least):
                before = self._new_state()
                self._free[before] = [end, self._add(repeat.part, start)]
                start = before
        for _ in range(repeat.least):
            start = self._add(repeat.part, start)
        return start

    def _new_state(self) -> int:
        if len(self._edges) >= _MAX_PARTS:
            raise _too_large()
        self._edges.append([])
        self._free.append([])
        return len(self._edges) - 1

    def _closure(self, states: Iterable[int]) -> States:
        reached = set(states)
        waiting = list(reached)
        while waiting:
            for after in self._free[waiting.pop()]:
                if after not in reached:
                    reached.add(after)
                    waiting.append(after)
        return frozenset(reached)


def combined(
    required: Sequence[Expression],
    excluded: Sequence[Expression],
    write: Writer,
    name: str,
    add_rule: Callable[[str, Expression], None],
    pace: Pace | None = None,
) -> Expression:
    """What matches all of `required`, of which there is one, and none of `excluded`.

    Its rules are given to `add_rule`, their names begin with `name`. InvalidArgumentError: it is too large.
    """
    automata = [CharacterAutomaton(expression) for expression in (*required, *excluded)]
    num_required = len(required)
    numbers: dict[tuple[States, ...], int] = {}
    waiting: list[tuple[States, ...]] = []

    def ref(states: tuple[States, ...]) -> Ref:
        number = numbers.get(states)
        if number is None:
            number = numbers[states] = len(numbers)
            waiting.append(states)
            if number >= _MAX_STATES:
                raise _too_large()
        return Ref(f"{name} state {number}")

    whole = ref(tuple(automaton.start for automaton in automata))
    while waiting:
        if pace is not None:
            pace.look()
        states = waiting.pop()
        following: dict[tuple[States, ...], list[tuple[int, int]]] = {}
        pairs = list(zip(automata, states, strict=True))
        cuts = sorted({0, LAST_CHARACTER + 1}.union(*(automaton.cuts(each) for automaton, each in pairs)))
        for low, high in pairwise(cuts):
            after = tuple(automaton.after(each, low) for automaton, each in pairs)
            if all(after[:num_required]):
                following.setdefault(after, []).append((low, high - 1))
        ends = [CharacterAutomaton.is_end(each) for each in states]
        is_end = all(ends[:num_required]) and not any(ends[num_required:])
        options = [concat(write(normalized(ranges)), ref(after)) for after, ranges in following.items()]
        add_rule(ref(states).rule, choice([*options, EMPTY if is_end else NEVER]))
    return whole


def _too_large() -> InvalidArgumentError:
    return InvalidArgumentError(
        "structured output: patterns, lengths and excluded values of a string need too large an automaton together; "
        "use shorter ones"
    )
