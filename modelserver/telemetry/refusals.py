"""Inference requests that were refused before any model accepted them, counted by reason.

A loaded model counts the requests that it accepted (`statistics`). These requests never reached one, and a name
invented by a client must not become a label.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from modelserver.errors import ErrorCode


class RefusalReason(enum.Enum):
    """Why; the values are the `reason` labels of the metric."""

    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    UNAVAILABLE = "UNAVAILABLE"  # the model or version is known and not ready, or the server is shutting down
    INVALID = "INVALID"  # the request does not fit the model's config
    OVERLOADED = "OVERLOADED"  # the caller's quota is used up
    OTHER = "OTHER"


_REASONS = {
    ErrorCode.NOT_FOUND: RefusalReason.UNKNOWN_MODEL,
    ErrorCode.UNAVAILABLE: RefusalReason.UNAVAILABLE,
    ErrorCode.OVERLOADED: RefusalReason.OVERLOADED,
    ErrorCode.INVALID_ARGUMENT: RefusalReason.INVALID,
    ErrorCode.PAYLOAD_TOO_LARGE: RefusalReason.INVALID,
}


class RefusalCounts:
    """Counts since the start of the server. Event loop thread only."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(RefusalReason, 0)

    def record(self, code: ErrorCode) -> None:
        """Count a request that was refused with an error of this code."""
        self._counts[_REASONS.get(code, RefusalReason.OTHER)] += 1

    def snapshot(self) -> Mapping[RefusalReason, int]:
        return dict(self._counts)
