"""A complete answer, and how an API writes those that are errors."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import msgspec

from modelserver.core.tensor import Buffer


class HttpResponse(msgspec.Struct, eq=False):
    """A complete answer; the wire adds Content-Length and writes `body`'s buffers one after the other.

    The buffers may be sent after `respond` has returned: they are never changed afterwards. Answers that have the
    same headers as others had best have the same tuple: wires recognise it.
    """

    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    body: tuple[Buffer, ...] = ()


class ErrorWriter(abc.ABC):
    """The form of an API's errors."""

    @abc.abstractmethod
    def failed(self, error: Exception) -> HttpResponse:
        """The answer to a request that failed. What is not a ServerError is a fault of ours, and logged."""

    @abc.abstractmethod
    def refused(self, status: int, message: str, code: str | None = None) -> HttpResponse:
        """The answer to a request that no handler got; `code` is for machines, where the API has such words."""

    def restricted(self, header: str) -> HttpResponse:
        """The answer to a request without the header that the operator wants for its group."""
        return self.refused(403, f"This API is restricted, expecting header '{header}'", "restricted")
