"""One HTTP request and its answer, as the handlers see them: no socket and no server library.

A wire (our own over HTTP/1.1 or HTTP/2, or uvicorn) makes an `HttpExchange` of its own kind per request,
hands it to `HttpHandler.handle` on the event loop, and is called back by `respond`. The infer path answers
from the model's callback, so it needs neither a Task nor a Future; slow handlers may use both.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from modelserver.auth.access import EVERYBODY, Admitted
from modelserver.auth.guard import Needs
from modelserver.core.tensor import Buffer
from modelserver.protocol.response import PLAIN_ERRORS
from modelserver.protocol.response import ErrorWriter as ErrorWriter
from modelserver.protocol.response import HttpResponse as HttpResponse


class HttpHead:
    """The request line and headers. Equal requests of a connection may share one: never change it.

    `path` has no query, and is not decoded, so that an encoded slash does not separate segments. Header names are lower
    case; `names` has the original form of names that were sent otherwise, as HTTP/1.1 allows. `memo` is the frontend's:
    the data that a route derived from this head. `shorthand` stands for this head in messages of a front process that
    passes requests on.
    """

    __slots__ = ("headers", "memo", "method", "names", "path", "query", "shorthand")

    def __init__(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        query: str = "",
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.headers: Mapping[str, str] = headers if headers is not None else {}
        self.query = query
        self.names: Mapping[str, str] = names if names is not None else {}
        self.memo: RouteMemo | None = None
        self.shorthand: Any = None


class RouteMemo:
    """The data that a route derived from a head, kept for the next equal head: extend this.

    An exchange with such a head goes to `recall`, with the memo, and not through the router; `needs` are the route's.
    """

    __slots__ = ("needs", "recall")

    needs: Needs
    recall: Callable[[HttpExchange, Any], None]


class ResponseWriter(Protocol):
    """The body of an answer that is sent piece by piece (SSE), with back-pressure.

    Each method raises ConnectionError when the peer has left, except `close` and `abort`.
    """

    def send(self, data: Buffer) -> bool:
        """Send `data` soon, from a callback; False asks the caller to await `wait_for_room` before it sends more."""

    async def wait_for_room(self) -> None:
        """Return when the peer has room for more."""

    async def write(self, data: Buffer) -> None:
        """Send `data`; returns when the peer has room for more."""

    async def close(self) -> None:
        """End the body."""

    def abort(self) -> None:
        """Break the answer off, in a way that tells the peer that it is not complete."""


class HttpExchange(abc.ABC):
    """A request, and the one way to answer it. Everything is called on the event loop thread.

    Wires extend this. `body` is complete and still compressed as the client sent it, and valid as long as there are
    references to it. `on_disconnect` is set by a handler that has work to stop when the client leaves before its
    answer; the wire calls it at most once.
    """

    __slots__ = ("body", "head", "on_disconnect")

    head: HttpHead
    body: Buffer
    on_disconnect: Callable[[], None] | None
    # Whether the request may wait for those of clients: models that know priorities answer it last.
    is_background: ClassVar[bool] = False

    @property
    def peer(self) -> str:
        """The address that the request comes from; empty where the wire does not know, and once it is answered."""
        return ""

    @abc.abstractmethod
    def respond(self, response: HttpResponse) -> None:
        """Answer completely. Exactly one of `respond` and `start` is called, once; ignored if the client left."""

    @abc.abstractmethod
    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        """Begin an answer whose body follows piece by piece; a content-length among the headers must be right."""


class HttpHandler(Protocol):
    """An HTTP frontend as wires see it: it answers every exchange, now or later, and does not raise."""

    def handle(self, exchange: HttpExchange) -> None: ...

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:  # noqa: ARG002  # most admit everybody
        """Admits the body of a request, or gives the answer to a request that is refused by its head.

        Wires ask before they collect a body that did not come with the head. `handle` checks again later: keys may
        change meanwhile, and wires do not ask about whole requests.
        """
        return EVERYBODY

    def errors(self, path: str) -> ErrorWriter:  # noqa: ARG002  # most serve one API
        """The writer of errors for requests of `path`, including requests that reach no handler."""
        return PLAIN_ERRORS
