"""Interprets one token of a config.pbtxt as the value of a field."""

from __future__ import annotations

from google.protobuf import text_encoding
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from modelserver.config import scalar
from modelserver.config.lexer import Token
from modelserver.config.suggestion import did_you_mean, suggest_enum

_TRUE_FALSE = ("true", "t", "True", "1", "false", "f", "False", "0")
_GUESSES = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}


def shown(token: Token) -> str:
    """The token as an error text quotes it."""
    if token.kind == "end":
        return "the end of the file"
    if token.kind in ("mark", "junk"):
        return scalar.shorten(f"'{token.text}'" if token.text.isprintable() else ascii(token.text))
    return scalar.shorten(token.text)


def scalar_problem(field: FieldDescriptor, token: Token) -> tuple[str, str | None] | None:
    """The problem of a value that is not a valid string, and a hint."""
    text, kind = token.text, field.cpp_type
    wrong = f"{scalar.expected(field)}, got {shown(token)}"
    if field.enum_type is not None:
        if text in field.enum_type.values_by_name:
            return None
        number = _integer(text)
        if number is not None and number in field.enum_type.values_by_number:
            return None
        return wrong, did_you_mean(suggest_enum(text.strip("\"'"), field.enum_type.values_by_name))
    if kind in scalar.INTEGER_RANGES:
        number = _integer(text)
        if number is not None:
            out_of_range = scalar.range_problem(field, number)
            return (out_of_range, None) if out_of_range else None
        return wrong, _unquoted(text) if _integer(text.strip("\"'")) is not None else None
    if kind in scalar.FLOATS:
        return None if _is_float(text) else (wrong, _unquoted(text) if _is_float(text.strip("\"'")) else None)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        if text in _TRUE_FALSE:
            return None
        return wrong, did_you_mean(_GUESSES.get(text.strip("\"'").lower()))
    return wrong, did_you_mean(f'"{scalar.shorten(text)}"')


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
    if entry.fields_by_name["key"].cpp_type in scalar.INTEGER_RANGES:
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
    return 0 if entry.fields_by_name["key"].cpp_type in scalar.INTEGER_RANGES else ""
