"""Inference calls that are shorter than their description: the core gets their bytes, and decodes them itself.

A decoded request has to be described, read, made anew and answered by a description that is read in turn. For a few
numbers that is more work than to decode them, most of all where calls repeat themselves and are known by their bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Final

import msgspec

from modelserver.auth.access import Access, Admitted, ApiGroup
from modelserver.core.recognition import Memory
from modelserver.core.tensor import Buffer
from modelserver.protocol.call import Method, UnaryCall
from modelserver.protocol.compression import choose_encoding
from modelserver.protocol.exchange import HttpExchange, HttpHandler, HttpHead
from modelserver.protocol.kserve import ASKING_HEADER, JSON_LEN_HEADER, READ_HEADERS
from modelserver.protocol.response import ErrorWriter, HttpResponse
from modelserver.wire.processes.link import Link
from modelserver.wire.processes.messages import (
    Cancel,
    Content,
    CoreBundle,
    ShortCall,
    ShortExchange,
    ShortFailure,
    ShortHead,
    ShortReply,
    ShortResponse,
    ShortResponseHead,
)

# Tensors are found by their places, but text must be parsed: the core should not parse or write much of it.
MAX_SHORT_BYTES: Final = 4 << 10
MAX_SHORT_TEXT_BYTES: Final = 1 << 10
_NEVER: Final = -1
# Heads that are remembered; a longer one is not worth its bytes.
_MAX_REMEMBERED: Final = 1024
_MAX_HEAD_BYTES: Final = 512

_encode = msgspec.msgpack.Encoder().encode
_decode_response_head = msgspec.msgpack.Decoder(ShortResponseHead).decode


class Shorthand:
    """The record that stands for an `HttpHead` on its way to the core, and the largest body that travels with it."""

    __slots__ = ("max_bytes", "text")

    def __init__(self, text: bytes = b"", max_bytes: int = _NEVER) -> None:
        self.text = text
        self.max_bytes = max_bytes


class ShortCalls:
    """The short calls that the core has not answered. Event loop thread only."""

    def __init__(self, link: Link[CoreBundle], numbers: count[int], *, is_on: bool) -> None:
        """`numbers` are those of calls, unique in this process. `is_on`: heads of answers are remembered."""
        self._link = link
        self._send = link.send
        self._next_number = numbers.__next__
        self._calls: dict[int, Any] = {}
        self._heads = Memory[bytes, ShortResponseHead](_MAX_REMEMBERED, is_on=is_on)

    @property
    def num_inflight(self) -> int:
        """Calls that the core has not answered."""
        return len(self._calls)

    def grpc(self, infer: Method) -> Method:
        """ModelInfer: short calls go to the core, others to `infer`."""
        infer_here = infer.unary
        assert infer_here is not None, "ModelInfer is not a stream"
        calls, next_number, cancel, send = self._calls, self._next_number, self._cancel, self._send

        def forward(call: UnaryCall) -> None:
            message = call.message
            if len(message) > MAX_SHORT_BYTES:
                infer_here(call)
                return
            number = next_number()
            calls[number] = call
            call.on_cancel = partial(cancel, number)
            send(ShortCall(number, call.deadline_ns, bytes(message)))

        return replace(infer, unary=forward)

    def http(self, is_infer: Callable[[HttpHead], bool], other: HttpHandler) -> HttpHandler:
        """A frontend that has the core answer short calls that `is_infer` knows by their heads, and `other` others."""
        return _ShortHttp(self, is_infer, other)

    def exchange(self, exchange: HttpExchange, text: bytes) -> None:
        """Forward an HTTP request, of which `text` is the head."""
        number = self._next_number()
        self._calls[number] = exchange
        exchange.on_disconnect = partial(self._cancel, number)
        self._send(ShortExchange(number, text, bytes(exchange.body)))

    def on_reply(self, message: ShortReply) -> None:
        """A gRPC call is answered."""
        content = message.content
        call: UnaryCall = self._calls.pop(message.call)
        call.reply((content if type(content) is bytes else self._view(content),))

    def on_failure(self, message: ShortFailure) -> None:
        """A gRPC call has failed."""
        call: UnaryCall = self._calls.pop(message.call)
        call.fail(message.status, message.text, message.retry_ms)

    def on_response(self, message: ShortResponse) -> None:
        """An HTTP request is answered."""
        exchange: HttpExchange = self._calls.pop(message.call)
        head = self._heads.known.get(message.head) or self._read_head(message.head)
        content = message.body
        body = content if type(content) is bytes else self._view(content)
        if len(body) > MAX_SHORT_BYTES:
            # Calls with short requests and long answers are served here from now on, so that the long answers are
            # written here.
            exchange.head.shorthand.max_bytes = _NEVER
        exchange.respond(HttpResponse(head.status, head.headers, (body,)))

    def _cancel(self, number: int) -> None:
        """The client left. The core answers the call nevertheless."""
        if number in self._calls:
            self._send(Cancel(number))

    def _view(self, content: Content) -> Buffer:
        data = self._link.view(content)
        return data if isinstance(data, bytes) else data.data

    def _read_head(self, text: bytes) -> ShortResponseHead:
        head = _decode_response_head(text)
        if len(text) <= _MAX_HEAD_BYTES:
            self._heads.remember(text, head)
        return head


class _ShortHttp(HttpHandler):
    """Tells short infer calls from all other requests."""

    def __init__(self, calls: ShortCalls, is_infer: Callable[[HttpHead], bool], other: HttpHandler) -> None:
        self._forward = calls.exchange
        self._is_infer = is_infer
        self._other = other

    def handle(self, exchange: HttpExchange) -> None:
        head = exchange.head
        shorthand = head.shorthand
        if shorthand is None:
            shorthand = head.shorthand = _shorthand(head) if self._is_infer(head) else Shorthand()
        if len(exchange.body) <= shorthand.max_bytes:
            self._forward(exchange, shorthand.text)
        else:
            self._other.handle(exchange)

    def check_head(self, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        return self._other.check_head(head, peer)

    def errors(self, path: str) -> ErrorWriter:
        return self._other.errors(path)


def is_open(access: Access) -> bool:
    """Whether the metadata of inference calls is unused: then the core needs only their bytes."""
    return access == Access(restrictions=access.restrictions) and access.restriction(ApiGroup.INFERENCE) is None


def _shorthand(head: HttpHead) -> Shorthand:
    """That of an infer call."""
    headers = head.headers
    if _is_special(headers):
        return Shorthand()
    known = {name: headers[name] for name in READ_HEADERS if name in headers}
    try:
        text = _encode(ShortHead(head.path, head.query, known))
    except UnicodeEncodeError:
        return Shorthand()
    return Shorthand(text, _max_body_bytes(headers)) if len(text) <= _MAX_HEAD_BYTES else Shorthand()


def _is_special(headers: Mapping[str, str]) -> bool:
    """Whether there is more to the call than to decode it: work that is not the core's, or the model has a say."""
    accepted = headers.get("accept-encoding")
    return (
        "content-encoding" in headers
        or ASKING_HEADER in headers
        or "text/event-stream" in headers.get("accept", "")
        or (accepted is not None and choose_encoding(accepted) is not None)
    )


def _max_body_bytes(headers: Mapping[str, str]) -> int:
    """The size up to which a body is short: of JSON alone, or of tensors behind some JSON."""
    text = headers.get(JSON_LEN_HEADER)
    if text is None:
        return MAX_SHORT_TEXT_BYTES
    is_size = text.isascii() and text.isdigit() and len(text) < 10
    return MAX_SHORT_BYTES if is_size and 0 < int(text) <= MAX_SHORT_TEXT_BYTES else _NEVER
