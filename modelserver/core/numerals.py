"""Numbers as clients, operators and authors of models write them: ASCII digits, without Python's extensions.

Python's own `int` and `float` also take `1_000` and the digits of every script, which a proxy, another reader of the
same text, or a person may take for something else.
"""

from __future__ import annotations

import math
import re
from typing import Final

_BLANKS: Final = " \t\r\n"
_WHOLE: Final = re.compile(r"[+-]?[0-9]+")
_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def parse_int(text: str) -> int:
    """The whole number that a text writes, with or without a sign and blanks around it. Raises ValueError."""
    word = text.strip(_BLANKS)
    if _WHOLE.fullmatch(word) is None:
        raise ValueError(f"not a whole number: '{text:.40}'")
    return int(word)


def parse_float(text: str) -> float:
    """The finite number that a text writes, in decimals or with an exponent. Raises ValueError."""
    word = text.strip(_BLANKS)
    number = float(word) if _DECIMAL.fullmatch(word) else math.inf
    if math.isinf(number):
        raise ValueError(f"not a number: '{text:.40}'")
    return number


def is_digits(text: str, max_len: int = 18) -> bool:
    """Whether a text is a whole number without a sign, of at most `max_len` digits: 18 always fit 64 bits."""
    return len(text) <= max_len and text.isascii() and text.isdigit()
