r"""Regular expressions in the dialect of llguidance, which is that of Rust's `regex`.

Where Python, JavaScript and Rust differ, only that is allowed which all of them would take: `\d`, `\w` and `\s` are
ASCII's, and `\D`, `\W` and `\S` leave out what any of them would.
"""

from __future__ import annotations

import re

from modelserver.backend import InvalidArgumentError

_COUNTS = re.compile(r"\{(\d*)(,?)(\d*)\}")
# Classes by their letter: the characters that all engines include, and those that any engine includes.
_NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\x0b\f\r\x20"}
_WIDE = {"d": r"\d", "w": r"\w", "s": r"\s\x1c-\x1f\x{feff}"}
_PLAIN_ESCAPES = {"0": r"\x00", "Z": "$", "/": "/", "v": r"\x0b"}
_MAX_COUNT = 100_000


def library_pattern(pattern: str) -> str:
    """A pattern of Python's or JavaScript's dialect in Rust's. What neither knows is left for the library to refuse."""
    return _Translation(pattern).translate()


class _Translation:
    """One pass over one pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0

    def translate(self) -> str:
        found: list[str] = []
        is_quantified = False
        while self._place < len(self._pattern):
            character = self._pattern[self._place]
            if character == "\\":
                found.append(self._escape())
            elif character == "[":
                found.append(self._class())
            elif character == "{" and (counts := self._counts()) is not None:
                found.append(counts)
                is_quantified = True
                continue
            elif character == "+" and is_quantified:
                raise self._wrong("possessive repetitions are not supported")
            else:
                found.append(character)
                self._place += 1
                is_quantified = character in "*+?" and not is_quantified
                continue
            is_quantified = False
        return "".join(found)

    def _counts(self) -> str | None:
        match = _COUNTS.match(self._pattern, self._place)
        if match is None or not (match[1] or match[3]):
            return None
        if max(int(match[1] or 0), int(match[3] or 0)) > _MAX_COUNT:
            raise self._wrong(f"a repetition {match[0]} is not possible: at most {_MAX_COUNT} are")
        self._place = match.end()
        return f"{{{match[1] or 0}{match[2]}{match[3]}}}"

    def _escape(self) -> str:
        """An escape outside of a class."""
        letter = self._next_of_escape()
        if letter in _NARROW:
            return f"[{_NARROW[letter]}]"
        if letter.lower() in _WIDE:
            return f"[^{_WIDE[letter.lower()]}]"
        return _PLAIN_ESCAPES.get(letter) or f"\\{letter}"

    def _class(self) -> str:
        """A class in brackets; what is special in Rust's and not in others' is escaped."""
        start = self._place
        self._place += 1
        is_negated = self._pattern.startswith("^", self._place)
        self._place += is_negated
        found = ["[^" if is_negated else "["]
        is_first = True
        while is_first or not self._pattern.startswith("]", self._place):
            if self._place >= len(self._pattern):
                self._place = start
                raise self._wrong("a class in brackets does not end")
            character = self._pattern[self._place]
            if character == "\\":
                found.append(self._escape_in_class(self._next_of_escape(), is_negated))
            else:
                is_doubled = character == "-" and self._pattern.startswith("--", self._place)
                found.append(f"\\{character}" if character in "[]&~" or is_doubled else character)
                self._place += 1
            is_first = False
        self._place += 1
        return "".join(found) + "]"

    def _escape_in_class(self, letter: str, is_negated: bool) -> str:
        if letter in _NARROW:
            return _WIDE[letter] if is_negated else _NARROW[letter]
        if letter.lower() in _WIDE:
            return f"[^{(_NARROW if is_negated else _WIDE)[letter.lower()]}]"
        return r"\x08" if letter == "b" else _PLAIN_ESCAPES.get(letter) or f"\\{letter}"

    def _next_of_escape(self) -> str:
        """The letter after a backslash, which is passed."""
        if self._place + 1 >= len(self._pattern):
            raise self._wrong("a backslash stands at the end")
        self._place += 2
        return self._pattern[self._place - 1]

    def _wrong(self, what: str) -> InvalidArgumentError:
        begin = max(0, self._place - 10)
        return InvalidArgumentError(
            f"structured output: regular expression, character {self._place}: {what}, "
            f"at {self._pattern[begin : self._place + 20]!r}"
        )
