"""The head of an HTTP/1.1 answer."""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from urllib.parse import quote

# What may be in the value of a header (RFC 9110, 5.5), the letters of Latin-1 apart: nobody agrees on those.
_VALUE_CHARACTERS = "\t" + "".join(map(chr, range(0x20, 0x7F)))
_REASONS = {status.value: status.phrase for status in HTTPStatus}

# Answers that have no body, and no header that tells its size (RFC 9110, 8.6).
BODYLESS = frozenset({204, 304})

LENGTH = b"Content-Length: %d\r\n\r\n"
LENGTH_AND_CLOSE = b"Content-Length: %d\r\nConnection: close\r\n\r\n"
# HTTP/1.0 clients that asked for it are told.
LENGTH_AND_KEEP_ALIVE = b"Content-Length: %d\r\nConnection: keep-alive\r\n\r\n"
NO_LENGTH = b"\r\n"
CLOSE = b"Connection: close\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@lru_cache(maxsize=512)
def answer_start(status: int, headers: tuple[tuple[str, str], ...]) -> bytes:
    """The status line and the headers, without those that say where the answer ends. Most answers repeat theirs."""
    lines = "".join([f"{name}: {field_value(value)}\r\n" for name, value in headers])
    return f"HTTP/1.1 {status} {_REASONS.get(status, '')}\r\n{lines}".encode("latin-1")


def field_value(text: str) -> str:
    """`text` as the value of a header: what could end the line, or has no agreed form, is percent-encoded.

    Values may quote what users sent: this is what keeps them from writing headers of their own.
    """
    if text.isascii() and text.isprintable():
        return text
    return quote(text, safe=_VALUE_CHARACTERS, errors="replace")
