"""Grammars in GBNF, llama.cpp's dialect of EBNF: `name ::= alternatives`, one rule called `root`.

Literals in double quotes, classes as in regular expressions, `.`, groups, `|`, `*`, `+`, `?`, `{m,n}`; comments begin
with `#`. A rule ends where the next one begins. No rule may begin with itself.
"""

from __future__ import annotations

import re

from modelserver.backend import InvalidArgumentError

from .character_sets import written_plainly
from .expression import (
    LAST_CHARACTER,
    Characters,
    Expression,
    Ref,
    Repeat,
    choice,
    complement,
    concat,
    literal,
    normalized,
)
from .program import ROOT

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SPACE = re.compile(r"(\s+|#[^\n]*)+")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(,)?\s*(\d+)?\s*\}")
_ESCAPE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([nrt\"'\\\[\]^/-])")
_CONTROL_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09}
_MAX_DEPTH = 100
_MAX_COUNT = 100_000


def grammar_rules(text: str) -> dict[str, Expression]:
    """The rules by name; InvalidArgumentError says in which line what is wrong."""
    rules = _GrammarParser(text).parse()
    if ROOT not in rules:
        raise InvalidArgumentError(
            f"structured output: the grammar has no rule {ROOT!r}; it has {', '.join(rules) or 'none'}"
        )
    return {ROOT: rules.pop(ROOT), **rules}


class _GrammarParser:
    """One pass over one grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0

    def parse(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        self._skip()
        while self._place < len(self._text):
            name = self._name()
            if name is None or not self._take("::="):
                raise self._wrong("a rule 'name ::= ...' is expected")
            if name in rules:
                raise self._wrong(f"rule {name!r} is defined twice")
            rules[name] = self._alternatives()
        return rules

    def _alternatives(self) -> Expression:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return choice(options)

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while (atom := self._atom()) is not None:
            parts.append(self._repeated(atom))
        return concat(*parts)

    def _repeated(self, part: Expression) -> Expression:
        while True:
            if self._take("*"):
                part = Repeat(part, 0, None)
            elif self._take("+"):
                part = Repeat(part, 1, None)
            elif self._take("?"):
                part = Repeat(part, 0, 1)
            elif self._text.startswith("{", self._place):
                part = Repeat(part, *self._counts())
            else:
                return part

    def _counts(self) -> tuple[int, int | None]:
        match = _COUNTS.match(self._text, self._place)
        if match is None:
            raise self._wrong("{m}, {m,} or {m,n} is expected")
        least, comma, most = match.groups()
        first = int(least)
        last = int(most) if most else None if comma else first
        if max(first, last or 0) > _MAX_COUNT or (last is not None and last < first):
            raise self._wrong(f"a repetition {match.group()} is not possible")
        self._place = match.end()
        self._skip()
        return first, last

    def _atom(self) -> Expression | None:
        """The next element; None where the sequence ends."""
        if self._take("("):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise self._wrong(f"groups are more than {_MAX_DEPTH} deep")
            inner = self._alternatives()
            if not self._take(")"):
                raise self._wrong("')' is expected")
            self._depth -= 1
            return inner
        if self._text.startswith('"', self._place):
            return self._literal()
        if self._text.startswith("[", self._place):
            return self._class()
        if self._take("."):
            return Characters(normalized([(0, LAST_CHARACTER)]))
        place = self._place
        name = self._name()
        if name is not None and self._text.startswith("::=", self._place):
            self._place = place  # the next rule begins here
            return None
        return None if name is None else Ref(name)

    def _literal(self) -> Expression:
        self._place += 1
        characters = []
        while not self._text.startswith('"', self._place):
            characters.append(chr(self._character()))
        self._place += 1
        self._skip()
        return literal("".join(characters))

    def _class(self) -> Expression:
        self._place += 1
        is_negated = self._text.startswith("^", self._place)
        self._place += is_negated
        ranges = []
        while not self._text.startswith("]", self._place):
            low = high = self._character()
            if self._text.startswith("-", self._place) and not self._text.startswith("-]", self._place):
                self._place += 1
                high = self._character()
            if high < low:
                raise self._wrong("a range of characters ends before it begins")
            ranges.append((low, high))
        self._place += 1
        self._skip()
        return written_plainly(complement(ranges) if is_negated else normalized(ranges))

    def _character(self) -> int:
        """One character of a literal or a class, perhaps escaped."""
        if self._place >= len(self._text) or self._text[self._place] == "\n":
            raise self._wrong("a literal or a class does not end")
        character = self._text[self._place]
        self._place += 1
        if character != "\\":
            return ord(character)
        match = _ESCAPE.match(self._text, self._place)
        if match is None:
            raise self._wrong(f"the escape \\{self._text[self._place : self._place + 1]} is not known")
        self._place = match.end()
        *digits, lone = match.groups()
        if lone is not None:
            return _CONTROL_ESCAPES.get(lone, ord(lone))
        code = int(next(one for one in digits if one), 16)
        if code > LAST_CHARACTER or 0xD800 <= code <= 0xDFFF:
            raise self._wrong(f"the escape {match.group()} names no character")
        return code

    def _name(self) -> str | None:
        match = _NAME.match(self._text, self._place)
        if match is None:
            return None
        self._place = match.end()
        self._skip()
        return match.group()

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._place):
            return False
        self._place += len(text)
        self._skip()
        return True

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._place)
        if match is not None:
            self._place = match.end()

    def _wrong(self, what: str) -> InvalidArgumentError:
        line = self._text.count("\n", 0, self._place) + 1
        found = self._text[self._place : self._place + 20]
        return InvalidArgumentError(f"structured output: grammar, line {line}: {what}, at {found!r}")
