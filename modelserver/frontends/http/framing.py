"""How the documents of an answer are framed: as server-sent events, as lines of JSON, or as one document.

A wire keeps silent event streams open with comments (`: ping`); lines and single documents have no comments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from modelserver.core.tensor import Buffer
from modelserver.frontends.http.body import respond_compressed
from modelserver.protocol.compression import choose_encoding
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.response import JSON_HEADERS, HttpResponse

# Placeholder for the text that changes. Names of models and ids never have such characters.
_MARK = "\x00text\x00"


@dataclass(frozen=True, slots=True)
class Framing:
    """Frames of documents that follow one another in one answer.

    `end` follows the last one. `error_name` is the event name of an error in a stream that has begun: its status was
    200, so only the frame can report the error.
    """

    content_type: str
    before: bytes
    after: bytes
    end: bytes = b""
    error_name: str = ""

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The headers of the answer. They ask proxies not to buffer it."""
        return [("Content-Type", self.content_type), ("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no")]

    def frame(self, document: bytes, name: str = "") -> bytes:
        """One document, which is JSON without line breaks; as an event of that name, if the framing has names."""
        if name and self.before:
            return b"event: %b\n%b%b%b" % (name.encode(), self.before, document, self.after)
        return b"%b%b%b" % (self.before, document, self.after)

    def error(self, document: Mapping[str, Any]) -> bytes:
        """An error in an answer that has begun. Nothing follows it, not even `end`."""
        return self.frame(orjson.dumps(document), self.error_name)


SSE = Framing("text/event-stream; charset=utf-8", b"data: ", b"\n\n")
# OpenAI's streams have an end of their own.
SSE_DONE = Framing(SSE.content_type, SSE.before, SSE.after, end=b"data: [DONE]\n\n")
NDJSON = Framing("application/x-ndjson", b"", b"\n")


# Of a stream: as one, or in parts that would take long to join.
Frames = bytes | list[bytes]


class PreparedFrame:
    """A frame in which only some values change, mostly one text: the rest is encoded once."""

    __slots__ = ("_after", "_before", "_between")

    # Put this into the document in place of each value that changes.
    MARK = _MARK

    def __init__(self, framing: Framing, document: Mapping[str, Any], name: str = "") -> None:
        self._before, *parts = framing.frame(orjson.dumps(document), name).split(orjson.dumps(_MARK))
        assert parts, "the document has a mark"
        *self._between, self._after = parts

    def with_text(self, text: str) -> bytes:
        """The frame of a document with one mark."""
        return self._before + orjson.dumps(text) + self._after

    def with_values(self, *values: str | int) -> bytes:
        """The frame with a value in the place of each mark, in their order."""
        found = self._before
        for value, after in zip(values, (*self._between, self._after), strict=True):
            found += (b"%d" % value if type(value) is int else orjson.dumps(value)) + after
        return found


def respond_document(exchange: HttpExchange, document: object, headers: Sequence[tuple[str, str]] = ()) -> None:
    """Answer completely: one JSON document, compressed if the client prefers that."""
    respond_text(exchange, (orjson.dumps(document),), headers)


def respond_text(exchange: HttpExchange, parts: tuple[Buffer, ...], headers: Sequence[tuple[str, str]] = ()) -> None:
    """As `respond_document`, of a document that is JSON text already, in parts. `headers` are further ones."""
    accepted = exchange.head.headers.get("accept-encoding")
    response = HttpResponse(200, (*JSON_HEADERS, *headers) if headers else JSON_HEADERS, parts)
    respond_compressed(exchange, response, choose_encoding(accepted) if accepted else None)
