"""Arguments as pybind11 takes them for Triton: text may be bytes, an integer whatever has `__index__` (NumPy's do)."""

from __future__ import annotations

import operator


def text_of(what: str, value: object) -> str:
    """`value`, a str or UTF-8 bytes, as a plain str. Raises TypeError, naming `what`, for anything else."""
    if type(value) is str:
        return value
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, str):
        return str(value)  # of a subclass, such as NumPy's
    raise TypeError(f"{what} must be str or bytes, got {type(value).__name__}")


def integer_of(what: str, value: object, lowest: int = 0) -> int:
    """`value` as a plain int of at least `lowest`, and of 64 bits. Raises TypeError, naming `what`."""
    if type(value) is not int:
        try:
            value = operator.index(value)  # type: ignore[arg-type]  # this is how one finds out
        except TypeError:
            raise TypeError(f"{what} must be an integer, got {type(value).__name__}") from None
    if not lowest <= value < 1 << 64:
        raise TypeError(f"{what} must be an integer from {lowest} to 2**64-1, got {value}")
    return value
