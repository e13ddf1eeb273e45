"""An exchange placed before another one; it sees the answer first."""

from __future__ import annotations

from collections.abc import Callable

from modelserver.protocol.exchange import HttpExchange, ResponseWriter
from modelserver.protocol.response import HttpResponse


class RelayedExchange(HttpExchange):
    """Passes on the head of an answer as `change` returns it."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: HttpExchange) -> None:
        self.head = exchange.head
        self.body = exchange.body
        self._exchange = exchange

    @property
    def on_disconnect(self) -> Callable[[], None] | None:
        return self._exchange.on_disconnect

    @on_disconnect.setter
    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        self._exchange.on_disconnect = callback

    @property
    def peer(self) -> str:
        return self._exchange.peer

    def respond(self, response: HttpResponse) -> None:
        response.headers = self.change(list(response.headers))
        self._exchange.respond(response)

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        return self._exchange.start(status, self.change(headers))

    def change(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """The headers that the client gets instead."""
        return headers
