"""The protobuf wire format, as far as reading needs it: fields of a message, in place."""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


class WireFormatError(ValueError):
    """The bytes are no protobuf message."""


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of every field: an int, or a view of the bytes. Raises WireFormatError, also half-way."""
    place, end = 0, len(message)
    while place < end:
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireFormatError(f"field number 0 at byte {place}")
        value: int | memoryview
        if kind == _VARINT:
            value, place = _varint(message, place)
        elif kind == _BYTES:
            length, place = _varint(message, place)
            value, place = _taken(message, place, length)
        elif kind in (_FIXED64, _FIXED32):
            value, place = _taken(message, place, 8 if kind == _FIXED64 else 4)
        else:
            raise WireFormatError(f"field {number} has the unknown wire type {kind}")
        yield number, value


def text(value: int | memoryview) -> str:
    """A string field. Raises WireFormatError for what is none."""
    if isinstance(value, int):
        raise WireFormatError("expected a string, got a number")
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise WireFormatError("expected a string, got other bytes") from error


def signed(value: int | memoryview) -> int:
    """An int64 field."""
    if not isinstance(value, int):
        raise WireFormatError("expected a number, got bytes")
    return value - (1 << 64) if value >> 63 else value


def nested(value: int | memoryview) -> memoryview:
    """A message field."""
    if isinstance(value, int):
        raise WireFormatError("expected a message, got a number")
    return value


def _taken(message: memoryview, place: int, length: int) -> tuple[memoryview, int]:
    if length > len(message) - place:
        raise WireFormatError(f"a field of {length} bytes at byte {place}, where {len(message) - place} are left")
    return message[place : place + length], place + length


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for position in range(_LONGEST_VARINT):
        if place >= len(message):
            raise WireFormatError("the message ends within a number")
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value & (1 << 64) - 1, place
    raise WireFormatError(f"a number of more than {_LONGEST_VARINT} bytes at byte {place}")
