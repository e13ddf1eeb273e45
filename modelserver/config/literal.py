"""Interprets one token of a config.pbtxt as the value of a field."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf import text_encoding
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from modelserver.config.fields import expected_enum
from modelserver.core.spelling import did_you_mean, suggest_enum

# Splits protobuf text format into tokens with positions. Never fails: invalid characters have kind `junk`.
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


_TRUE_FALSE = ("true", "t", "True", "1", "false", "f", "False", "0")
_GUESSES = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}


def shown(token: Token) -> str:
    """The token as an error text quotes it."""
    if token.kind == "end":
        return "the end of the file"
    if token.kind in ("mark", "junk"):
        return shorten(f"'{token.text}'" if token.text.isprintable() else ascii(token.text))
    return shorten(token.text)


def scalar_problem(field: FieldDescriptor, token: Token) -> tuple[str, str | None] | None:
    """The problem of a value that is not a valid string, and a hint."""
    text, kind = token.text, field.cpp_type
    wrong = f"{expected(field)}, got {shown(token)}"
    if field.enum_type is not None:
        if text in field.enum_type.values_by_name:
            return None
        number = _integer(text)
        if number is not None and number in field.enum_type.values_by_number:
            return None
        return wrong, did_you_mean(suggest_enum(text.strip("\"'"), field.enum_type.values_by_name))
    if kind in INTEGER_RANGES:
        number = _integer(text)
        if number is not None:
            out_of_range = range_problem(field, number)
            return (out_of_range, None) if out_of_range else None
        return wrong, _unquoted(text) if _integer(text.strip("\"'")) is not None else None
    if kind in FLOATS:
        return None if _is_float(text) else (wrong, _unquoted(text) if _is_float(text.strip("\"'")) else None)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        if text in _TRUE_FALSE:
            return None
        return wrong, did_you_mean(_GUESSES.get(text.strip("\"'").lower()))
    return wrong, did_you_mean(f'"{shorten(text)}"')


def _unquoted(text: str) -> str | None:
    return did_you_mean(text.strip("\"'"))


def _integer(text: str) -> int | None:
    """The integer of a token as protobuf reads it: decimal, 0x hexadecimal or 0 octal."""
    if len(text) > 30 or "_" in text:
        return None
    digits = text.lstrip("+-")
    octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
    try:
        return int(text, 8 if octal else 0)
    except ValueError:
        return None


def _is_float(text: str) -> bool:
    if "_" in text:
        return False
    try:
        float(text.rstrip("fF") if text[-1:] in "fF" and not text.lower().endswith("inf") else text)
    except ValueError:
        return False
    return True


def key_of(entry: Descriptor, token: Token) -> str | int:
    """The key of a map entry, as far as the token is one."""
    if entry.fields_by_name["key"].cpp_type in INTEGER_RANGES:
        number = _integer(token.text)
        return default_key(entry) if number is None else number
    if token.kind != "string" or token.text[-1:] != token.text[:1]:
        return token.text
    try:
        return text_encoding.CUnescape(token.text[1:-1]).decode()
    except ValueError:
        return token.text


def default_key(entry: Descriptor) -> str | int:
    """The key of a map entry without one."""
    return 0 if entry.fields_by_name["key"].cpp_type in INTEGER_RANGES else ""


# The accepted values of scalar fields: kinds, ranges and their descriptions.
INTEGER_RANGES: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
FLOATS = (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE)

_NAMES: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_INT32: "an integer",
    FieldDescriptor.CPPTYPE_INT64: "an integer",
    FieldDescriptor.CPPTYPE_UINT32: "an integer >= 0",
    FieldDescriptor.CPPTYPE_UINT64: "an integer >= 0",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a string",
}


def expected(field: FieldDescriptor) -> str:
    """`expected …`: what one value of a scalar field may be."""
    if field.enum_type is not None:
        return expected_enum(field.enum_type)
    return f"expected {_NAMES[field.cpp_type]}"


def range_problem(field: FieldDescriptor, value: int) -> str | None:
    """Why an integer does not fit its field, None if it does."""
    low, high = INTEGER_RANGES[field.cpp_type]
    if low <= value <= high:
        return None
    if value < 0 and low == 0:
        return f"expected an integer >= 0, got {shorten(str(value))}"
    return f"expected an integer in [{low}, {high}], got {shorten(str(value))}"


def fits_float(field: FieldDescriptor, value: float) -> bool:
    """Whether a number stays finite in its field; infinities and NaN are their own values."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT and math.isfinite(value):
        return abs(value) <= 3.4028235677973366e38
    return True


def shorten(text: str) -> str:
    """At most 60 characters of a user's text, for an error message."""
    return text if len(text) <= 60 else text[:57] + "..."
