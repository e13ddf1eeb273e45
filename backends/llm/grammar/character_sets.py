"""Named sets of characters, and the writing of characters: as they are, or as inside a JSON string."""

from __future__ import annotations

from collections.abc import Callable

from .expression import (
    NEVER,
    Characters,
    Choice,
    Expression,
    Literal,
    Ranges,
    choice,
    complement,
    concat,
    intersection,
    normalized,
)

DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = normalized([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACES: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_ASCII: Ranges = ((0x00, 0x7F),)
# What Unicode counts as white space beyond ASCII.
_UNICODE_SPACES: Ranges = normalized(
    [
        (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
        (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
    ]
)  # fmt: skip
NOT_LINE_END: Ranges = complement([(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])
# Engines differ in which letters and digits of Unicode are outside \w and \d: what all of them agree on.
NOT_DIGITS: Ranges = intersection(complement(DIGITS), _ASCII)
NOT_WORD: Ranges = intersection(complement(WORD), _ASCII)
NOT_SPACES: Ranges = complement([*SPACES, *_UNICODE_SPACES])

CLASSES = {"d": DIGITS, "w": WORD, "s": SPACES, "D": NOT_DIGITS, "W": NOT_WORD, "S": NOT_SPACES}

# How one of the characters of a set is written.
Writer = Callable[[Ranges], Expression]


def written_plainly(ranges: Ranges) -> Expression:
    return Characters(ranges) if ranges else NEVER


# What JSON strings hold as it is: all but control characters, the quote and the backslash.
JSON_PLAIN: Ranges = complement([(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
_SHORT_ESCAPES = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}


def written_in_json(ranges: Ranges) -> Expression:
    """Each character in one way: escaped only where it must be."""
    plain = intersection(ranges, JSON_PLAIN)
    options: list[Expression] = [Characters(plain)] if plain else []
    for low, high in intersection(ranges, complement(JSON_PLAIN)):
        for code in range(low, high + 1):
            short = _SHORT_ESCAPES.get(code)
            options.append(Literal(f"\\{short}".encode() if short else f"\\u{code:04x}".encode()))
    return choice(options)


def _hex(digits: str) -> Characters:
    return Characters(normalized([(ord(digit), ord(digit)) for digit in digits]))


_HEX = _hex("0123456789abcdefABCDEF")
# One character of a JSON string in any of the ways in which JSON may write it, but for pairs of surrogates.
JSON_CHARACTER: Expression = Choice(
    (
        Characters(JSON_PLAIN),
        concat(Literal(b"\\"), _hex('"\\/bfnrt')),
        concat(Literal(b"\\u"), _hex("0123456789abcefABCEF"), _HEX, _HEX, _HEX),
        concat(Literal(b"\\u"), _hex("dD"), _hex("01234567"), _HEX, _HEX),
    )
)
