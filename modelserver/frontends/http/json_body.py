"""Bodies that are a JSON object, or nothing: those of all calls but inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from modelserver.core.documents import check_fields
from modelserver.core.tensor import Buffer
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.body import check_size, with_plain_body
from modelserver.frontends.http.exchange import HttpExchange
from modelserver.frontends.http.json_text import check_depth
from modelserver.frontends.http.limits import HttpLimits


def with_object(exchange: HttpExchange, limits: HttpLimits, then: Callable[[dict[str, Any]], None]) -> None:
    """Call `then` with the exchange's body, the settings of an operator, now or later; errors are answered then.

    Raises ServerError for what is wrong at once.
    """
    check_size(exchange.body, limits)
    if "content-encoding" in exchange.head.headers:
        with_plain_body(exchange, limits, lambda body: then(_parse_settings(body, limits)))
    else:
        then(_parse_settings(exchange.body, limits))


def _parse_settings(body: Buffer, limits: HttpLimits) -> dict[str, Any]:
    """As `parse_object`, without fields that are there twice: operators write these bodies."""
    document = parse_object(body, limits)
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
    if not isinstance(document, dict):
        raise InvalidArgumentError("the request's JSON must be an object")
    return document
