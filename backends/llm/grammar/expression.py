"""What a text may be, as a tree: what JSON schemas, regular expressions and EBNF are turned into.

The leaves are sets of characters; how a character is written as bytes is decided by whoever makes the leaf, so that the
same regular expression can describe a text and the inside of a JSON string.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# The last character; surrogates, which no text has, lie between these.
LAST_CHARACTER = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)

# Beginnings within beginnings: deeper ones would exhaust Python's stack where they are read.
_MAX_SHARED_DEPTH = 32

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Characters:
    """One character out of inclusive ranges of code points, as UTF-8."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Literal:
    """These bytes."""

    text: bytes


@dataclass(frozen=True, slots=True)
class Concat:
    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the options; without options nothing matches."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """From `least` to `most` times; None: as often as one likes."""

    part: Expression
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """What the rule of this name says. Rules may refer to each other and to themselves."""

    rule: str


Expression = Characters | Literal | Concat | Choice | Repeat | Ref

EMPTY = Literal(b"")
NEVER = Choice(())


def literal(text: str) -> Literal:
    return Literal(text.encode())


def concat(*parts: Expression) -> Expression:
    """Nothing matches if nothing matches one of the parts."""
    kept: list[Expression] = []
    for part in parts:
        if part == NEVER:
            return NEVER
        if isinstance(part, Concat):
            kept.extend(part.parts)
        elif part != EMPTY:
            kept.append(part)
    return kept[0] if len(kept) == 1 else Concat(tuple(kept)) if kept else EMPTY


def choice(options: Iterable[Expression]) -> Expression:
    kept = tuple(dict.fromkeys(option for option in options if option != NEVER))
    return kept[0] if len(kept) == 1 else Choice(kept)


def one_of(texts: Iterable[bytes], depth: int = 0) -> Expression:
    """One of many texts, with beginnings that they share made once."""
    groups: dict[bytes, list[bytes]] = {}
    for text in dict.fromkeys(texts):
        groups.setdefault(text[:1], []).append(text)
    options: list[Expression] = []
    for group in groups.values():
        if len(group) == 1 or depth >= _MAX_SHARED_DEPTH:
            options += map(Literal, group)
        else:
            # What the first and the last in order share all between them do.
            first, last = min(group), max(group)
            length = next((at for at, byte in enumerate(first) if byte != last[at]), len(first))
            options.append(concat(Literal(first[:length]), one_of((text[length:] for text in group), depth + 1)))
    return choice(options)


def optional(part: Expression) -> Expression:
    return EMPTY if part == NEVER else Repeat(part, 0, 1)


def may_be_empty(expression: Expression) -> bool:
    """Whether the empty text matches, as far as can be told without the rules."""
    if isinstance(expression, Literal):
        return not expression.text
    if isinstance(expression, Concat):
        return all(map(may_be_empty, expression.parts))
    if isinstance(expression, Choice):
        return any(map(may_be_empty, expression.options))
    return isinstance(expression, Repeat) and (expression.least == 0 or may_be_empty(expression.part))


def without_empty(expression: Expression) -> Expression:
    """The same without the empty text; the very same if that does not match anyway."""
    if not may_be_empty(expression):
        return expression
    if isinstance(expression, Concat):
        # By halves: one option for each part would be too many.
        half = len(expression.parts) // 2
        first, last = concat(*expression.parts[:half]), concat(*expression.parts[half:])
        return choice([concat(without_empty(first), last), without_empty(last)])
    if isinstance(expression, Choice):
        return choice(map(without_empty, expression.options))
    if isinstance(expression, Repeat) and expression.most != 0:
        most = None if expression.most is None else expression.most - 1
        return concat(without_empty(expression.part), Repeat(expression.part, 0, most))
    return NEVER


def normalized(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, disjoint, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        elif low <= high:
            merged.append((low, high))
    first, last = _SURROGATES
    return tuple(
        (start, end)
        for low, high in merged
        for start, end in ((low, min(high, first - 1)), (max(low, last + 1), high))
        if start <= end
    )


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All other characters."""
    others, start = [], 0
    for low, high in normalized(ranges):
        others.append((start, low - 1))
        start = high + 1
    return normalized([*others, (start, LAST_CHARACTER)])


def intersection(first: Ranges, second: Ranges) -> Ranges:
    return normalized(
        (max(low, other_low), min(high, other_high)) for low, high in first for other_low, other_high in second
    )


def length_bounds(expression: Expression) -> tuple[int, int | None]:
    """How many characters a match has at least, and at most (None: no bound). For trees without literals and rules
    whose leaves are one character each, which regular expressions are."""
    if isinstance(expression, Characters):
        return 1, 1
    if isinstance(expression, Concat):
        bounds = [length_bounds(part) for part in expression.parts]
        most = [bound for _, bound in bounds]
        return sum(least for least, _ in bounds), None if None in most else sum(bound or 0 for bound in most)
    if isinstance(expression, Choice):
        bounds = [length_bounds(option) for option in expression.options]
        most = [bound for _, bound in bounds]
        return min(least for least, _ in bounds), None if None in most else max(bound or 0 for bound in most)
    if isinstance(expression, Repeat):
        least, bound = length_bounds(expression.part)
        unbounded = expression.most is None or bound is None
        return expression.least * least, None if unbounded else (expression.most or 0) * (bound or 0)
    assert isinstance(expression, Literal), f"{expression} has no length of its own"
    return len(expression.text.decode()), len(expression.text.decode())
