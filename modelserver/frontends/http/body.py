"""Bodies on their way in and out: size limit, decompression, compression. Large ones go through a thread.

`with_object` reads bodies that are a JSON object or empty: those of all calls except inference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

import orjson

from modelserver.core.documents import check_fields
from modelserver.core.json_pieces import check_depth, parse_slices, stripped
from modelserver.core.long_work import Slices, finish, long_work
from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError, PayloadTooLargeError, ServerError, UnsupportedError
from modelserver.protocol.compression import (
    MIN_COMPRESSED_BYTES,
    SUPPORTED,
    compress,
    decompress,
)
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits
from modelserver.protocol.response import HttpResponse, error_response

T = TypeVar("T")

# zlib on more than this would block the event loop for longer than a hop to a thread costs. A compressed
# body can grow a thousandfold, so its limit is lower.
_MAX_INLINE_COMPRESS_BYTES = 64 * 1024
_MAX_INLINE_DECOMPRESS_BYTES = 1024


def check_size(body: Buffer, limits: HttpLimits) -> None:
    """Raise PayloadTooLargeError when the body as sent is over the limit."""
    if len(body) > limits.max_body_bytes:
        raise PayloadTooLargeError(
            f"request JSON size of {len(body)} bytes exceeds the maximum allowed input size of "
            f"{limits.max_body_bytes} bytes. Use --http-max-input-size to increase the limit."
        )


def with_plain_body(exchange: HttpExchange, limits: HttpLimits, then: Callable[[Buffer], None]) -> None:
    """Call `then` with the decompressed body, now or from the event loop later; errors are answered here."""
    body = exchange.body
    encoding = exchange.head.headers["content-encoding"]
    work = partial(decompress, body, encoding, limits.max_body_bytes)
    if len(body) <= _MAX_INLINE_DECOMPRESS_BYTES:
        answer_errors(exchange, then, work)
        return
    future = long_work().compute(work)
    future.add_done_callback(lambda done: answer_errors(exchange, then, done.result))


def answer_errors(exchange: HttpExchange, then: Callable[[T], None], result: Callable[[], T]) -> None:
    """Call `then` with a result. An error that either raises is the exchange's answer."""
    try:
        then(result())
    except Exception as error:
        response = error_response(error)
        if isinstance(error, UnsupportedError):
            response.headers = (*response.headers, ("Accept-Encoding", SUPPORTED))
        exchange.respond(response)
        if isinstance(error, ServerError):
            # A Future keeps its error, and the traceback what the request was about: a cycle.
            error.__traceback__ = None


def respond_compressed(exchange: HttpExchange, response: HttpResponse, encoding: str | None) -> None:
    """Answer, in the encoding that `choose_encoding` chose; now or from the event loop later.

    Short answers and errors stay plain: tritonclient reads an error's text without looking at the encoding.
    """
    size = sum(map(len, response.body)) if encoding is not None else 0
    if encoding is None or response.status != 200 or size < MIN_COMPRESSED_BYTES:
        exchange.respond(response)
        return
    response.headers = (*response.headers, ("Content-Encoding", encoding))
    if size <= _MAX_INLINE_COMPRESS_BYTES:
        response.body = (compress(response.body, encoding),)
        exchange.respond(response)
        return

    future = long_work().compute(partial(compress, response.body, encoding))
    future.add_done_callback(lambda done: _finish_response(exchange, response, done))


def _finish_response(exchange: HttpExchange, response: HttpResponse, done: asyncio.Future[bytes]) -> None:
    try:
        response.body = (done.result(),)
    except Exception as error:
        response = error_response(error)
    exchange.respond(response)


# The slowest JSON takes 100 ms/MB.
MAX_BYTES_ON_LOOP: Final = 16 * 1024


def with_object(
    exchange: HttpExchange,
    limits: HttpLimits,
    then: Callable[[dict[str, Any]], None],
    *,
    has_unique_fields: bool = True,
) -> None:
    """Call `then` with the exchange's body, now or later; later errors are answered.

    With `has_unique_fields` a repeated field is an error. Raises ServerError for errors that are known at once.
    """

    def parse(body: Buffer) -> None:
        slices = _settings_slices if has_unique_fields else object_slices
        if len(body) <= MAX_BYTES_ON_LOOP:
            then(finish(slices(body, limits)))
        else:
            work = long_work().start(slices(body, limits), partial(answer_errors, exchange, then))
            exchange.on_disconnect = work

    check_size(exchange.body, limits)
    if "content-encoding" in exchange.head.headers:
        with_plain_body(exchange, limits, parse)
    else:
        parse(exchange.body)


def _settings_slices(body: Buffer, limits: HttpLimits) -> Slices[dict[str, Any]]:
    """As `object_slices`, and refuse repeated fields: operators write these bodies."""
    document = yield from object_slices(body, limits)
    if document:
        check_fields(bytes(body), "the request's JSON")
    return document


def parse_object(body: Buffer, limits: HttpLimits) -> dict[str, Any]:
    """A body that is empty or a JSON object. Raises InvalidArgumentError."""
    text = bytes(body)
    if not text.strip():
        return {}
    check_depth(text, limits.max_json_depth)
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"the request's JSON is malformed: {error}") from error
    return _object(document)


def object_slices(body: Buffer, limits: HttpLimits) -> Slices[dict[str, Any]]:
    """As `parse_object`, in slices where the body is long."""
    if len(body) <= MAX_BYTES_ON_LOOP:
        yield
        return parse_object(body, limits)
    if not stripped(memoryview(body)):
        return {}
    return _object((yield from parse_slices(body, max_depth=limits.max_json_depth, max_values=limits.max_json_values)))


def _object(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise InvalidArgumentError("the request's JSON must be an object")
    return document
