"""Arguments as pybind11 takes them for Triton: text may be bytes, an integer whatever has `__index__` (NumPy's do)."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


def text_of(what: str, value: object) -> str:
    """`value`, a str or UTF-8 bytes, as a plain str. Raises TypeError, naming `what`, for anything else."""
    if type(value) is str:
        return value
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, str):
        return str(value)  # of a subclass, such as NumPy's
    raise TypeError(f"{what} must be str or bytes, got {type(value).__name__}")


def integer_of(what: str, value: object, lowest: int = 0, *, num_bits: int = 64) -> int:
    """`value` as a plain int of at least `lowest` that fits into `num_bits` bits. Raises TypeError, naming `what`."""
    if type(value) is not int:
        try:
            value = operator.index(value)  # type: ignore[arg-type]  # this is how one finds out
        except TypeError:
            raise TypeError(f"{what} must be an integer, got {type(value).__name__}") from None
    if not lowest <= value < 1 << num_bits:
        raise TypeError(f"{what} must be an integer from {lowest} to 2**{num_bits}-1, got {value}")
    return value


def list_of(what: str, values: object) -> list[Any]:
    """The elements of a list or of another iterable. Raises TypeError, naming `what`, for text and what is not one."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{what} must be a list, got {type(values).__name__}")
    return list(values)


def number_of(what: str, value: object) -> float:
    """`value`, an integer or a floating-point number, as a plain float. Raises TypeError, naming `what`."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{what} must be a number, got {type(value).__name__}")
    try:
        return float(value)  # type: ignore[arg-type]  # this is how one finds out
    except TypeError:
        raise TypeError(f"{what} must be a number, got {type(value).__name__}") from None
