"""An exchange placed before another one; it sees the answer first, or changes the path that is answered."""

from __future__ import annotations

import re
from collections.abc import Callable

from modelserver.protocol.exchange import HttpExchange, HttpHead, ResponseWriter
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


_JSON_LEN = "Inference-Header-Content-Length"


class BinaryType:
    """A content type that includes the length of the JSON before the tensors, as clouds forward no other header."""

    def __init__(self, name: str, *, is_answered: bool) -> None:
        """`name`: such as application/vnd.sagemaker-triton.binary+json. `is_answered`: answers have it too.

        Vertex AI passes an answer's header on, and Triton's clients read the size there.
        """
        self._name = name
        self._is_answered = is_answered
        self._pattern = re.compile(re.escape(name) + r"\s*;\s*json-header-size=([0-9]{1,18})", re.IGNORECASE)

    def read(self, content_type: str) -> str | None:
        """The size that a request's content type gives; None for any other type."""
        match = self._pattern.fullmatch(content_type.strip())
        return match[1] if match is not None else None

    def rewrite(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Put the size into an answer's content type instead of our header, if the cloud wants it there."""
        if not self._is_answered:
            return headers
        size = next((value for key, value in headers if key == _JSON_LEN), None)
        if size is None:
            return headers
        kept = [(key, value) for key, value in headers if key not in ("Content-Type", _JSON_LEN)]
        return [*kept, ("Content-Type", f"{self._name};json-header-size={size}")]


class ReroutedExchange(RelayedExchange):
    """`exchange` as a request for `path` by `method`; its answer is the exchange's."""

    __slots__ = ("_binary_type",)

    def __init__(self, exchange: HttpExchange, method: str, path: str, binary_type: BinaryType) -> None:
        super().__init__(exchange)
        head = exchange.head
        headers = dict(head.headers)
        size = binary_type.read(headers.get("content-type", ""))
        if size is not None:
            headers[_JSON_LEN.lower()] = size
        self.head = HttpHead(method, path, headers, head.query, head.names)
        self._binary_type = binary_type

    def change(self, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return self._binary_type.rewrite(headers)
