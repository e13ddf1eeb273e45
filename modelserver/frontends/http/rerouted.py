"""An exchange that is answered as if it had come by another path: how clouds' own endpoints reach ours."""

from __future__ import annotations

import re
from collections.abc import Callable

from modelserver.frontends.http.exchange import HttpExchange, HttpHead, HttpResponse, ResponseWriter

_JSON_LEN = "Inference-Header-Content-Length"


class BinaryType:
    """A content type that says by itself how long the JSON before the tensors is, as clouds pass no other header on."""

    def __init__(self, name: str) -> None:
        """`name`: such as application/vnd.sagemaker-triton.binary+json."""
        self._name = name
        self._pattern = re.compile(re.escape(name) + r"\s*;\s*json-header-size=(\d{1,18})", re.IGNORECASE)

    def read(self, content_type: str) -> str | None:
        """The size that a request's content type gives; None for any other type."""
        match = self._pattern.fullmatch(content_type.strip())
        return match[1] if match is not None else None

    def write(self, response: HttpResponse) -> None:
        """Say it so in an answer, in place of our header."""
        size = next((value for key, value in response.headers if key == _JSON_LEN), None)
        if size is not None:
            own = ("Content-Type", _JSON_LEN)
            response.headers = [(key, value) for key, value in response.headers if key not in own]
            response.headers.append(("Content-Type", f"{self._name};json-header-size={size}"))


class ReroutedExchange(HttpExchange):
    """`exchange` as a request for `path` by `method`; its answer is the exchange's."""

    __slots__ = ("_binary_type", "_exchange")

    def __init__(self, exchange: HttpExchange, method: str, path: str, binary_type: BinaryType) -> None:
        head = exchange.head
        headers = dict(head.headers)
        size = binary_type.read(headers.get("content-type", ""))
        if size is not None:
            headers[_JSON_LEN.lower()] = size
        self.head = HttpHead(method, path, headers, head.query)
        self.body = exchange.body
        self._exchange = exchange
        self._binary_type = binary_type

    @property
    def on_disconnect(self) -> Callable[[], None] | None:
        return self._exchange.on_disconnect

    @on_disconnect.setter
    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        self._exchange.on_disconnect = callback

    def respond(self, response: HttpResponse) -> None:
        self._binary_type.write(response)
        self._exchange.respond(response)

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        return self._exchange.start(status, headers)
