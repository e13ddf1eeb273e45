"""The head of an HTTP/1.1 answer, and what a request's head says about its body."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}

Headers = list[tuple[str, str]]


def answer_head(status: int, headers: Headers, framing: str) -> bytes:
    """The bytes before an answer's body; `framing` are the header lines that say where the answer ends."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    return f"{_STATUS_LINES[status]}{lines}{framing}\r\n".encode("latin-1")


def split_target(target: bytes) -> tuple[str, str]:
    """The decoded path and the query of a request target; one in absolute form loses its host."""
    text = target.decode("latin-1")
    if not text.startswith("/"):
        parts = urlsplit(text)
        text = f"{parts.path or '/'}?{parts.query}"
    path, _, query = text.partition("?")
    return (unquote(path) if "%" in path else path), query


def content_length(headers: Mapping[str, str]) -> int | None:
    """The announced size of the body; the parser has checked that it is a number."""
    length = headers.get("content-length")
    return int(length) if length is not None else None


def json_length(headers: Mapping[str, str]) -> int:
    """Where an infer request's tensors begin; only a hint, the frontend checks it."""
    text = headers.get("inference-header-content-length", "")
    return int(text) if text.isdecimal() and len(text) < 19 else 0
