"""Grammars as text: GBNF, llama.cpp's dialect of EBNF, said in Lark's, which llguidance reads.

GBNF has rules `name ::= alternatives`, one of them called `root`; literals in double quotes, classes as in regular
expressions, `.`, groups, `|`, `*`, `+`, `?`, `{m,n}`; comments begin with `#`. A rule ends where the next one begins.
What refers to no rule that leads back to itself becomes one terminal of Lark's, which takes as many characters as it
can: texts are found much faster so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from modelserver.backend import InvalidArgumentError

_ROOT = "root"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SPACE = re.compile(r"(\s+|#[^\n]*)+")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(,)?\s*(\d+)?\s*\}")
_ESCAPE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([nrt\"'\\\[\]^/-])")
_CONTROL_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09}
_MAX_DEPTH = 100
_MAX_COUNT = 100_000
_LAST_CHARACTER = 0x10FFFF
# Of Lark: text that does not refer to a token of the vocabulary, and text that does; and what a grammar may not set.
_LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|(<)|(%llguidance)|(^[ \t]*[?!]?[\w-]+[ \t]*\[)',
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class _Terminal:
    """Characters or a literal, in Lark's words."""

    text: str


@dataclass(frozen=True, slots=True)
class _Ref:
    rule: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Part
    counts: str


_Part = _Terminal | _Ref | _Sequence | _Choice | _Repeat


def lark_of(text: str) -> str:
    """A grammar in GBNF as one in Lark's dialect; InvalidArgumentError says in which line what is wrong."""
    rules = _GrammarParser(text).parse()
    if _ROOT not in rules:
        raise InvalidArgumentError(
            f"structured output: the grammar has no rule {_ROOT!r}; it has {', '.join(rules) or 'none'}"
        )
    for name, rule in rules.items():
        for reference in _references(rule):
            if reference not in rules:
                raise InvalidArgumentError(
                    f"structured output: grammar: rule {name!r} refers to {reference!r}, which is not defined"
                )
    return _LarkWriter(rules).write()


def check_lark(text: str) -> None:
    """InvalidArgumentError for what a grammar of a request may not have: tokens by name or number, which could be
    special ones, options, and attributes of rules, which change how tokens are chosen."""
    for match in _LARK_TOKEN.finditer(text):
        if match.lastindex is not None:
            line = text.count("\n", 0, match.start()) + 1
            what = ("<tokens> are", "%llguidance is", "attributes of rules in brackets are")[match.lastindex - 1]
            raise InvalidArgumentError(f"structured output: grammar, line {line}: {what} not supported")


def _references(part: _Part) -> set[str]:
    found: set[str] = set()
    waiting = [part]
    while waiting:
        part = waiting.pop()
        if isinstance(part, _Ref):
            found.add(part.rule)
        elif isinstance(part, _Sequence):
            waiting += part.parts
        elif isinstance(part, _Choice):
            waiting += part.options
        elif isinstance(part, _Repeat):
            waiting.append(part.part)
    return found


class _LarkWriter:
    """Of one grammar. Names are made anew, because Lark's say by their case what is a terminal."""

    def __init__(self, rules: Mapping[str, _Part]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._regular = _regular_rules(rules)
        self._lines: list[str] = []
        self._num_terminals = 0

    def write(self) -> str:
        self._lines.append(f"start: {self._name(_ROOT)}")
        for name, rule in self._rules.items():
            body = self._terminal(rule) if name in self._regular else self._rule(rule)
            self._lines.append(f"{self._name(name)}: {body}")
        return "\n".join(self._lines)

    def _name(self, rule: str) -> str:
        return f"{'T' if rule in self._regular else 'r'}{self._numbers[rule]}"

    def _terminal(self, part: _Part) -> str:
        """A part of a terminal."""
        if isinstance(part, _Terminal):
            return part.text
        if isinstance(part, _Ref):
            return self._name(part.rule)
        if isinstance(part, _Repeat):
            return f"({self._terminal(part.part)}){part.counts}"
        if isinstance(part, _Choice):
            return f"({' | '.join(map(self._terminal, part.options))})"
        return " ".join(map(self._terminal, part.parts)) or '""'

    def _rule(self, part: _Part) -> str:
        """A part of a rule; its regular parts become terminals of their own."""
        if self._is_regular(part):
            return self._new_terminal([part])
        if isinstance(part, _Sequence):
            return self._sequence(part)
        if isinstance(part, _Choice):
            return f"({' | '.join(map(self._rule, part.options))})"
        if isinstance(part, _Repeat):
            return f"({self._rule(part.part)}){part.counts}"
        assert isinstance(part, _Ref), f"{part} is regular"
        return self._name(part.rule)

    def _sequence(self, sequence: _Sequence) -> str:
        found: list[str] = []
        regular: list[_Part] = []
        for part in sequence.parts:
            if self._is_regular(part):
                regular.append(part)
                continue
            if regular:
                found.append(self._new_terminal(regular))
                regular = []
            found.append(self._rule(part))
        if regular:
            found.append(self._new_terminal(regular))
        return " ".join(found)

    def _new_terminal(self, parts: list[_Part]) -> str:
        self._num_terminals += 1
        name = f"P{self._num_terminals}"
        self._lines.append(f"{name}: {self._terminal(_Sequence(tuple(parts)))}")
        return name

    def _is_regular(self, part: _Part) -> bool:
        return _references(part) <= self._regular


def _regular_rules(rules: Mapping[str, _Part]) -> set[str]:
    """Those that lead to no rule that leads back to itself."""
    references = {name: _references(rule) for name, rule in rules.items()}
    regular: set[str] = set()
    while found := {name for name, named in references.items() if name not in regular and named <= regular}:
        regular |= found
    return regular


class _GrammarParser:
    """One pass over one grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0

    def parse(self) -> dict[str, _Part]:
        rules: dict[str, _Part] = {}
        self._skip()
        while self._place < len(self._text):
            name = self._name()
            if name is None or not self._take("::="):
                raise self._wrong("a rule 'name ::= ...' is expected")
            if name in rules:
                raise self._wrong(f"rule {name!r} is defined twice")
            rules[name] = self._alternatives()
        return rules

    def _alternatives(self) -> _Part:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self) -> _Part:
        parts: list[_Part] = []
        while (atom := self._atom()) is not None:
            parts.append(self._repeated(atom))
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _repeated(self, part: _Part) -> _Part:
        depth = 0
        while True:
            if self._place < len(self._text) and self._text[self._place] in "*+?":
                counts = self._text[self._place]
                self._take(counts)
            elif self._text.startswith("{", self._place):
                counts = self._counts()
            else:
                return part
            depth += 1
            if depth > _MAX_DEPTH:
                raise self._wrong(f"repetitions nest too deeply: more than {_MAX_DEPTH}")
            part = _Repeat(part, counts)

    def _counts(self) -> str:
        match = _COUNTS.match(self._text, self._place)
        if match is None:
            raise self._wrong("{m}, {m,} or {m,n} is expected")
        least, comma, most = match.groups()
        last = int(most) if most else None if comma else int(least)
        if max(int(least), last or 0) > _MAX_COUNT or (last is not None and last < int(least)):
            raise self._wrong(f"a repetition {match.group()} is not possible")
        self._place = match.end()
        self._skip()
        return f"{{{least}{comma or ''}{most or ''}}}"

    def _atom(self) -> _Part | None:
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
            return _Terminal("/(?s:.)/")
        place = self._place
        name = self._name()
        if name is not None and self._text.startswith("::=", self._place):
            self._place = place  # the next rule begins here
            return None
        return None if name is None else _Ref(name)

    def _literal(self) -> _Part:
        self._place += 1
        characters = []
        while not self._text.startswith('"', self._place):
            characters.append(chr(self._character()))
        self._place += 1
        self._skip()
        return _Terminal(json.dumps("".join(characters), ensure_ascii=False))

    def _class(self) -> _Part:
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
            ranges.append(f"\\x{{{low:x}}}-\\x{{{high:x}}}")
        self._place += 1
        self._skip()
        if not ranges and not is_negated:
            raise self._wrong("a class without characters matches nothing")
        return _Terminal(f"/[{'^' * is_negated}{''.join(ranges)}]/" if ranges else "/(?s:.)/")

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
        if code > _LAST_CHARACTER or 0xD800 <= code <= 0xDFFF:
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
