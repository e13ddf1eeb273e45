"""Bodies that are a JSON object, or nothing: those of all calls but inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.body import check_size, with_plain_body
from modelserver.frontends.http.exchange import HttpExchange
from modelserver.frontends.http.json_text import check_depth
from modelserver.frontends.http.limits import HttpLimits


def with_object(exchange: HttpExchange, limits: HttpLimits, then: Callable[[dict[str, Any]], None]) -> None:
    """Call `then` with the exchange's body, now or later, and answer its errors then.

    Raises ServerError for what is wrong at once.
    """
    check_size(exchange.body, limits)
    if "content-encoding" in exchange.head.headers:
        with_plain_body(exchange, limits, lambda body: then(parse_object(body, limits)))
    else:
        then(parse_object(exchange.body, limits))


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
    if not isinstance(document, dict):
        raise InvalidArgumentError("the request's JSON must be an object")
    return document
