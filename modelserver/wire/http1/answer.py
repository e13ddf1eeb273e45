"""The head of an HTTP/1.1 answer."""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from urllib.parse import quote

# Characters allowed in the value of a header (RFC 9110, 5.5), except Latin-1 letters, which readers treat differently.
_VALUE_CHARACTERS = "\t" + "".join(map(chr, range(0x20, 0x7F)))
_REASONS = {status.value: status.phrase for status in HTTPStatus}

# Answers that have no body, and no header that tells its size (RFC 9110, 8.6).
BODYLESS = frozenset({204, 304})

LENGTH = b"Content-Length: %d\r\n\r\n"
LENGTH_AND_CLOSE = b"Content-Length: %d\r\nConnection: close\r\n\r\n"
# For HTTP/1.0 clients that asked for it.
LENGTH_AND_KEEP_ALIVE = b"Content-Length: %d\r\nConnection: keep-alive\r\n\r\n"
NO_LENGTH = b"\r\n"
CLOSE = b"Connection: close\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@lru_cache(maxsize=512)
def answer_start(status: int, headers: tuple[tuple[str, str], ...]) -> bytes:
    """The status line and the headers, without those that frame the body. Most answers repeat theirs."""
    lines = "".join([f"{name}: {field_value(value)}\r\n" for name, value in headers])
    return f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n{lines}".encode("latin-1")


def field_value(text: str) -> str:
    """`text` as the value of a header: line ends and characters outside ASCII are percent-encoded.

    Values may quote text from users: this prevents them from injecting headers.
    """
    if text.isascii() and text.isprintable():
        return text
    return quote(text, safe=_VALUE_CHARACTERS, errors="replace")
