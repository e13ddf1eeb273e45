"""JSON text before it is parsed: its nesting depth, and the NaN and Infinity tokens that strict parsers refuse."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

import numpy as np

from modelserver.errors import InvalidArgumentError

# Always matches from a quote on, closed string or not, so that hostile text costs no more than its length.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)', re.DOTALL)
_STRING_OR_COMMA = re.compile(_STRING.pattern + rb"|,", re.DOTALL)
_NON_FINITE = re.compile(rb"NaN|Infinity")
_STRING_OR_NON_FINITE = re.compile(_STRING.pattern + rb"|NaN|Infinity", re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_BLOCK = 1 << 20


def check_depth(text: bytes | bytearray, max_depth: int) -> None:
    """Raise InvalidArgumentError when objects and arrays nest deeper than `max_depth`; parses nothing."""
    # As many levels need at least as many brackets: almost every request ends here.
    if text.count(b"[") + text.count(b"{") <= max_depth:
        return
    brackets = np.frombuffer(_STRING.sub(b"", text), np.uint8)
    depth = 0
    for start in range(0, len(brackets), _BLOCK):
        block = brackets[start : start + _BLOCK]
        opened = (block == ord("[")) | (block == ord("{"))
        closed = (block == ord("]")) | (block == ord("}"))
        depths = np.cumsum(opened.astype(np.int32) - closed.astype(np.int32)) + depth
        if depths.max() > max_depth:
            raise InvalidArgumentError(f"JSON nesting depth exceeds maximum allowed limit ({max_depth})")
        depth = int(depths[-1])


def has_more_members(text: bytes, limit: int) -> bool:
    """Whether a flat object in valid JSON has more than `limit` members; what they nest counts, too. Parses nothing."""
    # A comma stands between two members, and may be in strings: almost every object ends with the first count.
    if text.count(b",") < limit:
        return False
    commas = (match for match in _STRING_OR_COMMA.finditer(text) if match[0] == b",")
    return sum(1 for _ in islice(commas, limit)) == limit


def has_non_finite(text: bytes | bytearray) -> bool:
    """Whether NaN or Infinity occurs in the text at all, as a token or inside a string."""
    return _NON_FINITE.search(text) is not None


def as_finite(text: bytes) -> bytearray:
    """As long a text, with zeros in place of the tokens NaN and Infinity: what strict parsers take to count in it."""
    finite = bytearray(text)
    for match in _STRING_OR_NON_FINITE.finditer(text):
        if not match[0].startswith(b'"'):
            finite[match.start() : match.end()] = b"0".ljust(len(match[0]))
    return finite


def parse_non_finite(text: bytes | bytearray) -> Any:
    """Parse JSON that may hold the bare tokens NaN, Infinity and -Infinity. Slow: for text that needs it.

    Raises InvalidArgumentError. All strings in the result have a UTF-8 form.
    """
    try:
        document = json.loads(text.decode())
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the request's JSON is malformed: {error}") from error
    return document


def dump_non_finite(values: list[Any]) -> bytes:
    """A flat list of numbers as JSON, with NaN, Infinity and -Infinity as bare tokens like Triton's."""
    return json.dumps(values, separators=(",", ":")).encode()
