"""Errors as a model.py writes them."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable
from typing import Any

from modelserver.backend import ErrorCode, ServerError


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


class TritonModelException(Exception):
    """Raised by a model, or by these utilities; the text goes to the client."""


class _Code(enum.IntEnum):
    """Numbered as in TRITONSERVER_Error_Code."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


_ERROR_CODES = {
    _Code.UNKNOWN: ErrorCode.UNKNOWN,
    _Code.INTERNAL: ErrorCode.INTERNAL,
    _Code.NOT_FOUND: ErrorCode.NOT_FOUND,
    _Code.INVALID_ARG: ErrorCode.INVALID_ARGUMENT,
    _Code.UNAVAILABLE: ErrorCode.UNAVAILABLE,
    _Code.UNSUPPORTED: ErrorCode.UNSUPPORTED,
    _Code.ALREADY_EXISTS: ErrorCode.ALREADY_EXISTS,
    _Code.CANCELLED: ErrorCode.CANCELLED,
}


_NUMBERS = {code: number for number, code in _ERROR_CODES.items()} | {
    ErrorCode.PAYLOAD_TOO_LARGE: _Code.INVALID_ARG,
    ErrorCode.OVERLOADED: _Code.UNAVAILABLE,
    ErrorCode.TIMED_OUT: _Code.UNAVAILABLE,
}


class TritonError:
    """The error of one response: it fails that request alone."""

    UNKNOWN = _Code.UNKNOWN
    INTERNAL = _Code.INTERNAL
    NOT_FOUND = _Code.NOT_FOUND
    INVALID_ARG = _Code.INVALID_ARG
    UNAVAILABLE = _Code.UNAVAILABLE
    UNSUPPORTED = _Code.UNSUPPORTED
    ALREADY_EXISTS = _Code.ALREADY_EXISTS
    CANCELLED = _Code.CANCELLED

    __slots__ = ("_code", "_message")

    def __init__(self, message: str | bytes, code: _Code = _Code.INTERNAL) -> None:
        self._message = text_of("message", message)
        if not isinstance(code, _Code):
            raise TypeError(f"code must be one of TritonError's, got {code!r}")
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    @classmethod
    def of(cls, error: ServerError) -> TritonError:
        """A server's error as a model sees it."""
        return cls(error.message, _NUMBERS[error.code])

    def server_error(self) -> ServerError:
        return ServerError(self._message, code=_ERROR_CODES[self._code])

    def __str__(self) -> str:
        return self._message
