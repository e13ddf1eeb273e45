"""Bodies that are a JSON object or empty: those of all calls except inference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import orjson

from modelserver.core.documents import check_fields
from modelserver.core.json_pieces import check_depth, parse_slices, stripped
from modelserver.core.long_work import Slices, finish, long_work
from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.body import answer_errors, check_size, with_plain_body
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.limits import HttpLimits

# The slowest JSON takes 100 ms/MB.
MAX_BYTES_ON_LOOP: Final = 16 * 1024


def with_object(
    exchange: HttpExchange,
    limits: HttpLimits,
    then: Callable[[dict[str, Any]], None],
    *,
    has_unique_fields: bool = True,
) -> None:
    """Call `then` with the exchange's body, an operator's settings, now or later; later errors are answered.

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
