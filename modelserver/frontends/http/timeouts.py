"""The headers of an HTTP call that apply to the infer requests which are made of it.

Among them is how long the client waits: Envoy and its derivatives tell servers in a header when they will give up (its
documentation of HTTP headers).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from modelserver.auth.access import Access
from modelserver.core.request import InFlightRequest
from modelserver.protocol.exchange import HttpExchange
from modelserver.protocol.kserve import TIMEOUT_HEADER

_MAX_DIGITS: Final = 12
_NS_PER_MS: Final = 1_000_000


def client_timeout_ns(headers: Mapping[str, str]) -> int:
    """The time from now on in which an answer is useful; 0: no limit, also if the header is not a number."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > _MAX_DIGITS:
        return 0
    return int(text) * _NS_PER_MS


def adopt(request: InFlightRequest, exchange: HttpExchange, access: Access) -> InFlightRequest:
    """Pass on what a call's headers say: forwarded headers, the client's trace, the deadline and the caller.

    Returns the request. Raises InvalidArgumentError as `Access` does.
    """
    head = exchange.head
    forwarded = access.forwarded(head.headers, head.names)
    if forwarded is not None:
        request.forward(forwarded)
    context = access.context(head.headers)
    if context:
        request.join_trace(context)
    timeout_ns = client_timeout_ns(head.headers)
    if timeout_ns:
        request.deadline_ns = time.monotonic_ns() + timeout_ns
    if access.callers_by:
        request.caller = access.caller(head.headers, exchange.peer)
    return request
