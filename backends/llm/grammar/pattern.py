"""Regular expressions without looking around or back: what can be an automaton.

Literals, escapes, classes, `.`, groups, alternatives and repetition, greedy or not; `^` and `$` at the ends. `\\d`,
`\\w` and `\\s` are ASCII's. InvalidArgumentError tells where a pattern has what is not supported.
"""

from __future__ import annotations

import dataclasses

from modelserver.backend import InvalidArgumentError

from .character_sets import CLASSES, NOT_LINE_END, Writer, written_plainly
from .expression import (
    EMPTY,
    LAST_CHARACTER,
    Expression,
    Ranges,
    Repeat,
    choice,
    complement,
    concat,
    normalized,
)

_CONTROL_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B, "0": 0x00}
_NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
# Deeper groups would exhaust Python's stack.
_MAX_DEPTH = 100
_MAX_COUNT = 100_000


def parse_pattern(pattern: str) -> Expression:
    """A text that matches the pattern from its start to its end."""
    parsed = PatternParser(pattern, written_plainly).parse()
    return parsed.expression


def parse_search(pattern: str, write: Writer) -> Expression:
    """A text in which the pattern is found, as JSON Schema has it; `write` says how its characters are written."""
    parsed = PatternParser(pattern, write).parse()
    anything = Repeat(write(((0, LAST_CHARACTER),)), 0, None)
    before = EMPTY if parsed.is_start_anchored else anything
    after = EMPTY if parsed.is_end_anchored else anything
    return concat(before, parsed.expression, after)


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    expression: Expression
    is_start_anchored: bool
    is_end_anchored: bool


class PatternParser:
    """One pass over one pattern, from left to right."""

    def __init__(self, pattern: str, write: Writer) -> None:
        self._text = pattern
        self._write = write
        self._place = 0
        self._depth = 0

    def parse(self) -> Pattern:
        is_start_anchored = self._take("^")
        expression, is_end_anchored = self._alternatives(is_top=True)
        if self._place < len(self._text):
            raise self._wrong("')' without '('")
        # An anchor belongs to one alternative only; around a group it would bind all.
        if (is_start_anchored or is_end_anchored) and self._has_top_alternatives:
            raise self._wrong("anchors beside alternatives; write ^(a|b)$ with a group")
        return Pattern(expression, is_start_anchored, is_end_anchored)

    def _alternatives(self, *, is_top: bool = False) -> tuple[Expression, bool]:
        options, is_anchored = [self._sequence()], False
        if is_top:
            is_anchored = self._take("$")
        while self._take("|"):
            options.append(self._sequence())
            if is_top and self._peek() == "$":
                raise self._wrong("anchors beside alternatives; write ^(a|b)$ with a group")
        if is_top:
            self._has_top_alternatives = len(options) > 1
        return (options[0] if len(options) == 1 else choice(options)), is_anchored

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while (character := self._peek()) not in ("", "|", ")"):
            if character == "$":
                if self._place == len(self._text) - 1 and self._depth == 0:
                    break
                raise self._wrong("'$' that is not at the end")
            parts.append(self._quantified(self._atom()))
        return concat(*parts)

    def _quantified(self, part: Expression) -> Expression:
        counts = self._counts()
        if counts is None:
            return part
        if not self._take("?") and self._peek() == "+":  # a lazy match is the same set of texts
            raise self._wrong("possessive repetition")
        if self._peek() in ("*", "+", "?") or self._counts() is not None:
            raise self._wrong("a repetition of a repetition; use a group")
        return Repeat(part, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        if self._peek() != "{":
            return None
        end = self._text.find("}", self._place)
        least, comma, most = self._text[self._place + 1 : max(end, 0)].partition(",")
        is_number = least.isdecimal() or (not least and comma and most.isdecimal())
        if end < 0 or not is_number or not (most.isdecimal() or not most):
            raise self._wrong("'{' that begins no {m}, {m,} or {m,n}; write \\{ for the character")
        self._place = end + 1
        first = int(least or 0)
        last = int(most) if most else None if comma else first
        if max(first, last or 0) > _MAX_COUNT or (last is not None and last < first):
            raise self._wrong(f"a repetition of {least or 0} to {most or 'any'} times")
        return first, last

    def _atom(self) -> Expression:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._write(self._class())
        if character == ".":
            return self._write(NOT_LINE_END)
        if character == "\\":
            return self._write(self._escape())
        if character in "*+?{":
            raise self._wrong(f"{character!r} that repeats nothing; write \\{character} for the character")
        if character == "^":
            raise self._wrong("'^' that is not at the start")
        return self._write(((ord(character), ord(character)),))

    def _group(self) -> Expression:
        if self._take("?"):
            if self._take("P<") or (self._peek() == "<" and self._peek(1) not in ("=", "!")):
                end = self._text.find(">", self._place)
                self._place = end + 1 if end >= 0 else len(self._text)
            elif not self._take(":"):
                raise self._wrong("a group that looks around or sets flags")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._wrong(f"groups more than {_MAX_DEPTH} deep")
        expression, _ = self._alternatives()
        if not self._take(")"):
            raise self._wrong("'(' without ')'")
        self._depth -= 1
        return expression

    def _class(self) -> Ranges:
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        is_first = True
        while is_first or self._peek() != "]":
            is_first = False
            low = self._class_item(is_negated)
            if self._peek() == "-" and self._peek(1) not in ("]", "") and len(low) == 1 and low[0][0] == low[0][1]:
                self._place += 1
                high = self._class_item(is_negated)
                if len(high) != 1 or high[0][0] != high[0][1] or high[0][0] < low[0][0]:
                    raise self._wrong("a range of characters that is none")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges.extend(low)
        self._place += 1
        return complement(ranges) if is_negated else normalized(ranges)

    def _class_item(self, is_negated: bool) -> Ranges:
        character = self._next()
        if character == "\\":
            if self._take("b"):
                return ((0x08, 0x08),)
            if is_negated and self._peek() in CLASSES:
                # All that any engine counts in, so that what is left is outside for every one.
                return complement(CLASSES[self._next().swapcase()])
            return self._escape()
        return ((ord(character), ord(character)),)

    def _escape(self) -> Ranges:
        character = self._next()
        if character in CLASSES:
            return CLASSES[character]
        if character in _NUM_HEX_DIGITS:
            return self._hex(_NUM_HEX_DIGITS[character])
        if character in _CONTROL_ESCAPES:
            code = _CONTROL_ESCAPES[character]
            return ((code, code),)
        if character.isalnum():
            raise self._wrong(f"the escape \\{character}")
        return ((ord(character), ord(character)),)

    def _hex(self, num_digits: int) -> Ranges:
        digits = self._text[self._place : self._place + num_digits]
        try:
            code = int(digits, 16) if len(digits) == num_digits and digits.isalnum() else -1
        except ValueError:
            code = -1
        if not 0 <= code <= LAST_CHARACTER or 0xD800 <= code <= 0xDFFF:
            raise self._wrong(f"an escape that names no character ({digits!r})")
        self._place += num_digits
        return ((code, code),)

    def _peek(self, ahead: int = 0) -> str:
        place = self._place + ahead
        return self._text[place] if place < len(self._text) else ""

    def _next(self) -> str:
        if self._place >= len(self._text):
            raise self._wrong("an end where more is expected")
        self._place += 1
        return self._text[self._place - 1]

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._place):
            self._place += len(text)
            return True
        return False

    def _wrong(self, what: str) -> InvalidArgumentError:
        shown = f"{self._text!r:.200}"
        return InvalidArgumentError(
            f"structured output: regular expression {shown}, at character {self._place}: {what} is not supported"
        )
