"""The core's side of short calls: the frontends that have the planes answer them, from the received bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final, NoReturn

import msgspec

from modelserver.core.recognition import Memory
from modelserver.protocol.call import GrpcHandler, Parts, UnaryCall
from modelserver.protocol.exchange import HttpExchange, HttpHandler, HttpHead
from modelserver.protocol.kserve import INFER_PATH
from modelserver.protocol.response import HttpResponse
from modelserver.wire.processes.link import Joined, Link
from modelserver.wire.processes.messages import (
    FrontBundle,
    ShortCall,
    ShortExchange,
    ShortFailure,
    ShortHead,
    ShortReply,
    ShortResponse,
    ShortResponseHead,
    portable,
)

# Heads that are remembered, of requests and of answers.
_MAX_REMEMBERED: Final = 1024
_OK: Final = 200
_NO_METADATA: Mapping[str, str | bytes] = {}

_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(ShortHead).decode


class ShortExchanges:
    """The short calls of one front that are in progress. Event loop thread only."""

    def __init__(
        self, http: HttpHandler | None, grpc: GrpcHandler | None, link: Link[FrontBundle], *, is_on: bool = True
    ) -> None:
        """A frontend is None where no port serves its protocol; then no call of it comes.

        `is_on`: requests that repeat are recognised.
        """
        self._http = http
        method = None if grpc is None else grpc.methods.get(INFER_PATH)
        self._infer = None if method is None else method.unary
        self.link = link
        self.send = link.send
        self.calls: dict[int, _Call | _Exchange] = {}
        # The contents of equal heads. The frontend leaves a memo with each.
        self._heads = Memory[bytes, HttpHead](_MAX_REMEMBERED, is_on=is_on)
        self._response_heads = Memory[object, bytes](_MAX_REMEMBERED, is_on=is_on)
        # The last ones of an answer with status 200: mostly the next one's, too.
        self._known_headers: object = None
        self._known_head = b""

    @property
    def num_inflight(self) -> int:
        """Calls that are not answered."""
        return len(self.calls)

    def call(self, message: ShortCall) -> None:
        """Have a gRPC call answered."""
        assert self._infer is not None, "no port has gRPC"
        call = self.calls[message.call] = _Call(self, message)
        self._infer(call)

    def exchange(self, message: ShortExchange) -> None:
        """Have an HTTP request answered."""
        assert self._http is not None, "no port has HTTP"
        head = self._heads.known.get(message.head) or self._read_head(message.head)
        exchange = self.calls[message.call] = _Exchange(self, message, head)
        self._http.handle(exchange)

    def cancel(self, number: int) -> bool:
        """The client left; whether `number` is one of these calls."""
        call = self.calls.get(number)
        if call is not None:
            call.cancel()
        return call is not None

    def close(self) -> None:
        """The front is gone, and with it all its clients."""
        for call in list(self.calls.values()):
            call.cancel()

    def response_head(self, response: HttpResponse) -> bytes:
        """The record that stands for the status and the headers."""
        headers = response.headers
        if headers is self._known_headers and response.status == _OK:
            return self._known_head
        key = (response.status, tuple(headers))
        text = self._response_heads.known.get(key) or self._write_head(key)
        # Only immutable objects are recognised.
        if response.status == _OK and type(headers) is tuple:
            self._known_headers, self._known_head = headers, text
        return text

    def _read_head(self, text: bytes) -> HttpHead:
        record = _decode_head(text)
        head = HttpHead("POST", record.path, record.headers, record.query)
        self._heads.remember(text, head)
        return head

    def _write_head(self, key: tuple[int, tuple[tuple[str, str], ...]]) -> bytes:
        text = _encode(ShortResponseHead(*key))
        self._response_heads.remember(key, text)
        return text


class _Call(UnaryCall):
    """A gRPC call, whose reply goes to the front."""

    __slots__ = ("_exchanges", "_number")

    def __init__(self, exchanges: ShortExchanges, message: ShortCall) -> None:
        self.message = message.message
        self.metadata = _NO_METADATA
        self.deadline_ns = message.deadline_ns
        self.on_cancel = None
        self._exchanges = exchanges
        self._number = message.call

    def reply(self, parts: Parts) -> None:
        exchanges, number = self._exchanges, self._number
        exchanges.calls.pop(number, None)
        exchanges.link.send_with(number, Joined(parts), partial(ShortReply, number))

    def fail(self, status: int, text: str, retry_ms: int = 0) -> None:
        exchanges, number = self._exchanges, self._number
        exchanges.calls.pop(number, None)
        exchanges.send(ShortFailure(number, status, portable(text), retry_ms))

    def cancel(self) -> None:
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()


class _Exchange(HttpExchange):
    """An HTTP request, whose answer goes to the front."""

    __slots__ = ("_exchanges", "_number")

    def __init__(self, exchanges: ShortExchanges, message: ShortExchange, head: HttpHead) -> None:
        self.head = head
        self.body = message.body
        self.on_disconnect = None
        self._exchanges = exchanges
        self._number = message.call

    def respond(self, response: HttpResponse) -> None:
        exchanges, number = self._exchanges, self._number
        exchanges.calls.pop(number, None)
        head = exchanges.response_head(response)
        exchanges.link.send_with(number, Joined(response.body), partial(ShortResponse, number, head))

    def start(self, _status: int, _headers: list[tuple[str, str]]) -> NoReturn:
        raise AssertionError("the answer to an infer call that takes no events has no pieces")

    def cancel(self) -> None:
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        if on_disconnect is not None:
            on_disconnect()
