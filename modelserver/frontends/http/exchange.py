"""One HTTP request and its answer, as the handlers see them: no socket and no server library.

A wire (uvicorn, or our own) makes an `HttpExchange` per request, hands it to `HttpFrontend.handle` on
the event loop, and is called back by `respond`. The infer path answers from the model's callback, so it
needs neither a Task nor a Future; slow handlers may use both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from modelserver.core.tensor import Buffer


@dataclass(slots=True)
class HttpRequest:
    """A received request. `path` is percent-decoded and has no query; header names are lower case.

    `body` is complete and still compressed as the client sent it.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | bytearray | memoryview = b""
    query: str = ""


@dataclass(slots=True)
class HttpResponse:
    """A complete answer; the wire adds Content-Length and writes `body`'s buffers one after the other."""

    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: tuple[Buffer, ...] = ()


class ResponseWriter(Protocol):
    """The body of an answer that is sent piece by piece (SSE), with back-pressure."""

    async def write(self, data: Buffer) -> None:
        """Send `data`; returns when the peer has room for more. Raises ConnectionError when it left."""

    async def close(self) -> None:
        """End the body."""


class HttpExchange:
    """A request, and the one way to answer it. Everything is called on the event loop thread."""

    __slots__ = ("_respond", "_start", "on_disconnect", "request")

    def __init__(
        self,
        request: HttpRequest,
        respond: Callable[[HttpResponse], None],
        start: Callable[[int, list[tuple[str, str]]], ResponseWriter],
    ) -> None:
        self.request = request
        self._respond = respond
        self._start = start
        # Set by a handler that has work to stop when the client leaves before its answer.
        self.on_disconnect: Callable[[], None] | None = None

    def respond(self, response: HttpResponse) -> None:
        """Answer completely. Exactly one of `respond` and `start` is called, once."""
        self._respond(response)

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        """Begin an answer whose body follows piece by piece."""
        return self._start(status, headers)


class Frontend(Protocol):
    """What a wire needs of a frontend: it answers every exchange, now or later, and does not raise."""

    def handle(self, exchange: HttpExchange) -> None: ...
