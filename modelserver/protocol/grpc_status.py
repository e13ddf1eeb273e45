"""The one table from `ErrorCode` to gRPC status, and how an error becomes a status message."""

from __future__ import annotations

import enum
from typing import Final
from urllib.parse import quote

from modelserver.errors import ErrorCode, ServerError

# The trailer that says after how many milliseconds a client may try again.
PUSHBACK: Final = "grpc-retry-pushback-ms"


class Status(enum.IntEnum):
    """The gRPC status codes that this server sends; numbers as on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


STATUS_OF: dict[ErrorCode, Status] = {
    ErrorCode.UNKNOWN: Status.UNKNOWN,
    ErrorCode.INTERNAL: Status.INTERNAL,
    ErrorCode.NOT_FOUND: Status.NOT_FOUND,
    ErrorCode.INVALID_ARGUMENT: Status.INVALID_ARGUMENT,
    ErrorCode.PAYLOAD_TOO_LARGE: Status.RESOURCE_EXHAUSTED,
    ErrorCode.UNAVAILABLE: Status.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: Status.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: Status.ALREADY_EXISTS,
    ErrorCode.CANCELLED: Status.CANCELLED,
    ErrorCode.OVERLOADED: Status.RESOURCE_EXHAUSTED,
    ErrorCode.TIMED_OUT: Status.DEADLINE_EXCEEDED,
    ErrorCode.UNAUTHENTICATED: Status.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED: Status.PERMISSION_DENIED,
}

# Status messages travel percent-encoded in trailers, and clients refuse trailers over 8 KiB: an error
# that long would arrive as an unrelated one.
_MAX_ENCODED_BYTES = 6000


def status_of(error: ServerError) -> tuple[int, str]:
    """The gRPC status and its message for an error; a very long message is shortened, saying so."""
    return STATUS_OF[error.code], _shorten(sendable(error.message))


def sendable(message: str) -> str:
    """The message as UTF-8 can carry it: file names and Python models may put lone surrogates into one."""
    return message if message.isascii() else message.encode(errors="replace").decode()


def _shorten(message: str) -> str:
    if len(message) * 12 <= _MAX_ENCODED_BYTES or _encoded_len(message) <= _MAX_ENCODED_BYTES:
        return message
    kept = message[:_MAX_ENCODED_BYTES]
    while _encoded_len(kept) > _MAX_ENCODED_BYTES:
        kept = kept[: len(kept) * 3 // 4]
    return f"{kept} ... ({len(message) - len(kept)} more characters)"


def _encoded_len(message: str) -> int:
    return len(quote(message, safe=_UNQUOTED))


# Characters that gRPC does not encode: printable ASCII except '%'.
_UNQUOTED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
