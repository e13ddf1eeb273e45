"""JSON text around its parsers: members that are counted first, NaN and Infinity, which strict parsers refuse."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any

import numpy as np

from modelserver.core.json_pieces import STRING
from modelserver.errors import InvalidArgumentError

_STRING_OR_COMMA = re.compile(STRING.pattern + rb"|,", re.DOTALL)
_NON_FINITE = re.compile(rb"NaN|Infinity")
_STRING_OR_NON_FINITE = re.compile(STRING.pattern + rb"|NaN|Infinity", re.DOTALL)
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_WORDS = {float("inf"): b"Infinity", float("-inf"): b"-Infinity"}


def has_more_members(text: bytes, limit: int) -> bool:
    """Whether a flat object in valid JSON has more than `limit` members; what they nest counts, too. Parses nothing."""
    # There is a comma between two members, and commas may be in strings: almost every object ends with the first count.
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


def with_non_finite(text: bytes, values: np.ndarray[Any, Any]) -> bytes:
    """The JSON of numbers with NaN, Infinity and -Infinity as bare tokens, like Triton's, in place of its nulls."""
    words = [_WORDS.get(value, b"NaN") for value in values[~np.isfinite(values)].tolist()]
    parts = text.split(b"null")
    return b"".join([piece for pair in zip(parts, [*words, b""], strict=True) for piece in pair])
