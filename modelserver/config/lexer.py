"""Splits protobuf text format into tokens with positions. Never fails: invalid characters have kind `junk`."""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n\f\v]+|\#[^\n]*)
      | (?P<name>[A-Za-z_][A-Za-z0-9_+-]*)
      | (?P<number>[-+]?\.?[0-9][A-Za-z0-9_.+-]*|-[A-Za-z]+)
      | (?P<string>"(?:[^"\\\n]|\\[^\n])*+"?|'(?:[^'\\\n]|\\[^\n])*+'?)
      | (?P<mark>[{}<>\[\]:,;])
      | (?P<junk>[^ \t\r\n\f\v\#A-Za-z_0-9.+\-"'{}<>\[\]:,;]+|.)""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the text and its offset; a token of kind `end` follows the last one."""

    kind: str
    text: str
    offset: int


class Lines:
    """Turns offsets into lines and columns, both counted from 1."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def position(self, offset: int) -> tuple[int, int]:
        line = bisect.bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1


def tokenize(text: str) -> list[Token]:
    """The tokens of the text without spaces and comments, then one of kind `end`."""
    tokens = [
        Token(match.lastgroup or "junk", match.group(), match.start())
        for match in _TOKEN.finditer(text)
        if match.lastgroup != "space"
    ]
    tokens.append(Token("end", "", len(text)))
    return tokens
