"""A complete answer, and how an API writes errors."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import msgspec

from modelserver.core.tensor import Buffer


class HttpResponse(msgspec.Struct, eq=False):
    """A complete answer; the wire adds Content-Length and writes `body`'s buffers one after the other.

    The buffers may be sent after `respond` has returned: they are never changed afterwards. Answers with equal headers
    should share one tuple: wires recognise it.
    """

    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    body: tuple[Buffer, ...] = ()


class ErrorWriter(abc.ABC):
    """The form of an API's errors."""

    @abc.abstractmethod
    def failed(self, error: Exception) -> HttpResponse:
        """The answer to a failed request. Any exception but a ServerError is our fault and logged."""

    @abc.abstractmethod
    def refused(self, status: int, message: str, code: str | None = None) -> HttpResponse:
        """The answer to a request that reached no handler; `code` is for machines, if the API has such codes."""

    def restricted(self, header: str) -> HttpResponse:
        """The answer to a request without the header that the operator requires for its group."""
        return self.refused(403, f"This API is restricted, expecting header '{header}'", "restricted")
