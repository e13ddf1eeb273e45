"""A request that was received, and the one way to answer it."""

from __future__ import annotations

from typing import Protocol

from modelserver.core.tensor import Buffer
from modelserver.protocol.exchange import HttpExchange, ResponseWriter
from modelserver.protocol.response import HttpResponse
from modelserver.wire.http1.head import RequestHead


class Answering(Protocol):
    """The connection, as its exchanges see it."""

    __slots__ = ()

    @property
    def peer(self) -> str:
        """The address of the client."""

    def answer(self, request: RequestHead, response: HttpResponse) -> None:
        """Send the whole answer to the request whose turn it is."""

    def begin_pieces(self, request: RequestHead, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        """Send the head of the answer to the request whose turn it is."""


class Http1Exchange(HttpExchange):
    """One exchange. It drops its reference to the connection when it is answered or lost.

    Objects that a handler sets on an exchange may refer to it: otherwise both would wait for the garbage collector.
    """

    __slots__ = ("_connection", "request")

    def __init__(self, connection: Answering, request: RequestHead, body: Buffer) -> None:
        self.head = request.http
        self.body = body
        self.on_disconnect = None
        self.request = request
        self._connection: Answering | None = connection

    @property
    def peer(self) -> str:
        connection = self._connection
        return "" if connection is None else connection.peer

    def respond(self, response: HttpResponse) -> None:
        """Answer completely; nothing happens when the client has left or the answer was given."""
        connection = self._connection
        if connection is not None:
            self._connection = self.on_disconnect = None
            connection.answer(self.request, response)

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        """Begin an answer in pieces: in chunks, or up to the close for a client that knows no chunks."""
        connection = self._connection
        if connection is None:
            return LostWriter()
        self._connection = None
        return connection.begin_pieces(self.request, status, headers)

    def ended(self) -> None:
        """The answer in pieces is complete."""
        self.on_disconnect = None

    def lost(self) -> None:
        """The client has left before its answer was complete."""
        on_disconnect = self.on_disconnect
        self._connection = self.on_disconnect = None
        if on_disconnect is not None:
            on_disconnect()


class LostWriter:
    """Takes an answer in pieces after its client has left."""

    def send(self, _data: Buffer) -> bool:
        raise ConnectionResetError("the client has left")

    async def wait_for_room(self) -> None:
        raise ConnectionResetError("the client has left")

    async def write(self, _data: Buffer) -> None:
        raise ConnectionResetError("the client has left")

    async def close(self) -> None:
        """There is nothing to end."""

    def abort(self) -> None:
        """There is nothing to break off."""
