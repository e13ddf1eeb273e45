"""How long the client of an HTTP request waits for its answer, if a proxy says so.

Envoy and its derivatives tell servers in a header when they will give up (its documentation of HTTP headers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from modelserver.protocol.kserve import TIMEOUT_HEADER

_MAX_DIGITS: Final = 12
_NS_PER_MS: Final = 1_000_000


def client_timeout_ns(headers: Mapping[str, str]) -> int:
    """The time from now on in which an answer is useful; 0: no limit, also if the header is not a number."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None or not (text.isascii() and text.isdigit()) or len(text) > _MAX_DIGITS:
        return 0
    return int(text) * _NS_PER_MS
