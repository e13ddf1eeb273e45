"""Rules as one nondeterministic automaton over bytes, whose edges may also call a rule.

States are numbers. A state has edges over ranges of bytes, edges that are free, and calls: to go through a rule and go
on elsewhere. Rules that can be empty are called and passed by as well, so that a call always takes at least a byte;
edges from where no end can be reached are taken away, so that whatever is begun can be ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from modelserver.backend import InvalidArgumentError

from .expression import Characters, Choice, Concat, Expression, Literal, Ref, Repeat, may_be_empty, without_empty
from .pace import Pace
from .utf8 import byte_sequences

ROOT = "root"
# How many states are made, or looked at, between looks at the clock.
_STATES_PER_LOOK = 256
# A part that is repeated more often than this, and is larger than that, becomes a rule: a copy is then one call.
_MAX_COPIES = 4
_MAX_COPIED_STATES = 2


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Of one grammar. `num_free_steps` bounds, over all states, how many others are reached without a byte."""

    num_states: int = 200_000
    num_free_steps: int = 1_000_000


@dataclass(slots=True)
class Rule:
    start: int
    end: int
    # A rule comes after all that may call it before a byte is read.
    rank: int = 0


@dataclass(slots=True)
class State:
    byte_edges: list[tuple[int, int, int]] = field(default_factory=list)  # first and last byte, next state
    free_edges: list[int] = field(default_factory=list)
    calls: list[tuple[int, int]] = field(default_factory=list)  # rule, state after it


class Program:
    """Built once, read by `Automaton`s from then on. `rules[0]` is the root."""

    def __init__(
        self, rules: Mapping[str, Expression], limits: CompileLimits | None = None, pace: Pace | None = None
    ) -> None:
        """InvalidArgumentError: too large, takes too long, a rule that is not there, begins with itself, or that no
        text matches. `pace` is entered already."""
        self._limits = limits or CompileLimits()
        self._pace = pace
        self.states: list[State] = []
        names = [ROOT, *(name for name in rules if name != ROOT)]
        self._numbers = {name: number for number, name in enumerate(names)}
        self.rules = [Rule(self._new_state(), self._new_state()) for _ in names]
        # Rules of repeated parts, by the id of the part, come after those that have names.
        self._repeated: dict[int, int] = {}
        self._parts: list[Expression] = []  # kept, so that ids stay theirs
        for name, rule in zip(list(names), list(self.rules), strict=True):
            self._add(rules[name], rule.start, rule.end)
            names.extend([name] * (len(self.rules) - len(names)))
        self.final_rule_of = {rule.end: number for number, rule in enumerate(self.rules)}
        _pass_by_empty_rules(self)
        _take_away_dead_ends(self)
        self._check_free_steps()
        root = self.states[self.rules[0].start]
        if not (root.byte_edges or root.free_edges or root.calls):
            raise InvalidArgumentError("structured output: no text matches what is asked for")
        _rank(self, names)

    def _new_state(self) -> int:
        self._check_room(1)
        self.look(len(self.states))
        self.states.append(State())
        return len(self.states) - 1

    def _check_room(self, num_states: int) -> None:
        if len(self.states) + num_states > self._limits.num_states:
            raise InvalidArgumentError(
                f"structured output: what is asked for needs more than {self._limits.num_states} states; "
                "use smaller repetitions (maxLength, maxItems, {m,n}) or fewer alternatives"
            )

    def look(self, step: int) -> None:
        """Look at the clock now and then; `step` counts them. InvalidArgumentError when time is over."""
        if step % _STATES_PER_LOOK == 0 and self._pace is not None:
            self._pace.look()

    def _check_free_steps(self) -> None:
        """Whoever follows a text takes them with each byte, so there must not be too many."""
        num_steps = 0
        for place in range(len(self.states)):
            self.look(place)
            if self.states[place].free_edges:
                num_steps += len(_reached_freely(self, place, set()))
            if num_steps > self._limits.num_free_steps:
                raise InvalidArgumentError(
                    "structured output: what is asked for leaves too much out; "
                    "repeat what may be empty, or leave out one after the other, less often"
                )

    def _add(self, expression: Expression, start: int, end: int) -> None:
        """Make ways from `start` to `end`."""
        if isinstance(expression, Literal):
            self._add_bytes([(byte, byte) for byte in expression.text], start, end)
        elif isinstance(expression, Characters):
            self._add_characters(expression, start, end)
        elif isinstance(expression, Concat):
            for part in expression.parts[:-1]:
                middle = self._new_state()
                self._add(part, start, middle)
                start = middle
            self._add(expression.parts[-1], start, end)
        elif isinstance(expression, Choice):
            for option in expression.options:
                self._add(option, start, end)
        elif isinstance(expression, Repeat):
            self._add_repeat(expression, start, end)
        else:
            self._add_call(expression, start, end)

    def _add_bytes(self, ranges: Iterable[tuple[int, int]], start: int, end: int) -> None:
        sequence = list(ranges)
        if not sequence:
            self.states[start].free_edges.append(end)
            return
        for first, last in sequence[:-1]:
            middle = self._new_state()
            self.states[start].byte_edges.append((first, last, middle))
            start = middle
        first, last = sequence[-1]
        self.states[start].byte_edges.append((first, last, end))

    def _add_characters(self, characters: Characters, start: int, end: int) -> None:
        """Characters that end alike share states: most sets need five."""
        after: dict[tuple[tuple[int, int], ...], int] = {(): end}
        for low, high in characters.ranges:
            for sequence in byte_sequences(low, high):
                target = end
                for place in range(len(sequence) - 1, 0, -1):
                    rest = sequence[place:]
                    state = after.get(rest)
                    if state is None:
                        state = after[rest] = self._new_state()
                        self.states[state].byte_edges.append((*rest[0], target))
                    target = state
                self.states[start].byte_edges.append((*sequence[0], target))

    def _add_repeat(self, repeat: Repeat, start: int, end: int) -> None:
        part = repeat.part
        if repeat.most is not None and may_be_empty(part):
            # Empty copies say nothing: what is left is as many others as one likes, up to the most.
            part = without_empty(part)
            repeat = Repeat(part, 0, repeat.most)
        num_copies = repeat.least if repeat.most is None else repeat.most
        self._check_room(num_copies)
        if num_copies > _MAX_COPIES and _size(part) > _MAX_COPIED_STATES:
            number = self._rule_of(part)
            self._add_copies(
                repeat, start, end, lambda before, after: self.states[before].calls.append((number, after))
            )
        else:
            self._add_copies(repeat, start, end, lambda before, after: self._add(part, before, after))

    def _rule_of(self, part: Expression) -> int:
        """The rule of a part that is repeated."""
        number = self._repeated.get(id(part))
        if number is None:
            number = self._repeated[id(part)] = len(self.rules)
            rule = Rule(self._new_state(), self._new_state())
            self.rules.append(rule)
            self._parts.append(part)
            self._add(part, rule.start, rule.end)
        return number

    def _add_copies(self, repeat: Repeat, start: int, end: int, add: Callable[[int, int], None]) -> None:
        for _ in range(repeat.least):
            middle = self._new_state()
            add(start, middle)
            start = middle
        if repeat.most is None:
            # A state of its own, so that no other way through `start` or `end` gets into the circle.
            circle = self._new_state()
            self.states[start].free_edges.append(circle)
            add(circle, circle)
            self.states[circle].free_edges.append(end)
            return
        for _ in range(repeat.most - repeat.least):
            self.states[start].free_edges.append(end)
            middle = self._new_state()
            add(start, middle)
            start = middle
        self.states[start].free_edges.append(end)

    def _add_call(self, ref: Ref, start: int, end: int) -> None:
        number = self._numbers.get(ref.rule)
        if number is None:
            raise InvalidArgumentError(f"structured output: rule {ref.rule!r} is used and not defined")
        self.states[start].calls.append((number, end))


def _size(expression: Expression) -> int:
    """Roughly how many states an expression takes."""
    if isinstance(expression, Literal):
        return len(expression.text)
    if isinstance(expression, Characters):
        return 1 if expression.ranges and expression.ranges[-1][1] < 0x80 else _MAX_COPIED_STATES + 1
    if isinstance(expression, Concat):
        return sum(map(_size, expression.parts))
    if isinstance(expression, Choice):
        return sum(map(_size, expression.options))
    return _MAX_COPIED_STATES + 1 if isinstance(expression, Repeat) else 1


def _pass_by_empty_rules(program: Program) -> None:
    """Add a free edge beside every call of a rule that can be empty."""
    empty: set[int] = set()
    changed = True
    while changed:
        changed = False
        for number, rule in enumerate(program.rules):
            program.look(number)
            if number not in empty and rule.end in _reached_freely(program, rule.start, empty):
                empty.add(number)
                changed = True
    for state in program.states:
        state.free_edges.extend(after for number, after in state.calls if number in empty)


def _reached_freely(program: Program, start: int, empty: set[int]) -> set[int]:
    reached, waiting = {start}, [start]
    while waiting:
        state = program.states[waiting.pop()]
        for other in [*state.free_edges, *(after for number, after in state.calls if number in empty)]:
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    return reached


def _take_away_dead_ends(program: Program) -> None:
    """A state is live if its rule's end can be reached from it through rules of which the same holds."""
    before: list[list[int]] = [[] for _ in program.states]
    callers: list[list[tuple[int, int]]] = [[] for _ in program.rules]
    for place, state in enumerate(program.states):
        for *_, after in state.byte_edges:
            before[after].append(place)
        for after in state.free_edges:
            before[after].append(place)
        for number, after in state.calls:
            callers[number].append((place, after))
    rule_of_start = {rule.start: number for number, rule in enumerate(program.rules)}
    calls_before: dict[int, list[tuple[int, int]]] = {}
    for number, pairs in enumerate(callers):
        for place, after in pairs:
            calls_before.setdefault(after, []).append((place, number))
    live: set[int] = set()
    useful: set[int] = set()
    waiting = [rule.end for rule in program.rules]
    while waiting:
        place = waiting.pop()
        if place in live:
            continue
        live.add(place)
        waiting.extend(before[place])
        waiting.extend(caller for caller, number in calls_before.get(place, ()) if number in useful)
        number_here = rule_of_start.get(place)
        if number_here is not None:
            useful.add(number_here)
            waiting.extend(caller for caller, after in callers[number_here] if after in live)
    for state in program.states:
        state.byte_edges = [edge for edge in state.byte_edges if edge[2] in live]
        state.free_edges = [after for after in state.free_edges if after in live]
        state.calls = [(number, after) for number, after in state.calls if number in useful and after in live]


def _rank(program: Program, names: list[str]) -> None:
    """Order the rules so that each is before those it begins with; InvalidArgumentError if one begins with itself."""
    begins = [
        {number for place in _reached_freely(program, rule.start, set()) for number, _ in program.states[place].calls}
        for rule in program.rules
    ]
    ranked: dict[int, int] = {}
    for root in range(len(begins)):
        path: list[tuple[int, list[int]]] = [(root, sorted(begins[root]))]
        on_path = {root}
        while path and root not in ranked:
            number, rest = path[-1]
            while rest and rest[-1] in ranked:
                rest.pop()
            if not rest:
                ranked[number] = len(ranked)
                on_path.discard(number)
                path.pop()
                continue
            following = rest.pop()
            if following in on_path:
                raise InvalidArgumentError(
                    f"structured output: rule {names[following]!r} begins with itself (left recursion); "
                    "let it begin with something else"
                )
            on_path.add(following)
            path.append((following, sorted(begins[following])))
    for number, order in ranked.items():
        program.rules[number].rank = len(ranked) - order
