"""A complete answer, and how an API writes errors."""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence
from math import ceil
from typing import Final

import msgspec
import orjson

from modelserver.core.tensor import Buffer
from modelserver.errors import ErrorCode, ServerError


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


class EarlyAnswerError(ServerError):
    """The error of a body whose request was answered before it was complete: the rest of it is not wanted."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(f"answered with {response.status}")
        self.response = response


def body_refused(error: ServerError, errors: ErrorWriter) -> HttpResponse:
    """The answer to a request whose body is not taken."""
    return error.response if isinstance(error, EarlyAnswerError) else errors.failed(error)


# The one table from error code to HTTP status, and the body of every error.
logger = logging.getLogger(__name__)

# Triton's numbers; 413 is ours, where Triton answers 400.
STATUS: dict[ErrorCode, int] = {
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARGUMENT: 400,
    ErrorCode.PAYLOAD_TOO_LARGE: 413,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 400,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.TIMED_OUT: 504,
    ErrorCode.UNAUTHENTICATED: 401,
    ErrorCode.PERMISSION_DENIED: 403,
}

_LONGEST_RETRY_S: Final = 3600

JSON_TYPE = ("Content-Type", "application/json")
JSON_HEADERS = (JSON_TYPE,)


def json_response(document: object, status: int = 200) -> HttpResponse:
    """`document` as an application/json answer."""
    return HttpResponse(status, JSON_HEADERS, (orjson.dumps(document),))


def bare_response(accept: str | None, document: object, status: int = 200) -> HttpResponse:
    """An answer whose status says everything: no body, as in Triton, so that scripts may append the status to it.

    `document` is for a client that names JSON in its `accept` header.
    """
    if accept and "application/json" in accept.lower():
        return json_response(document, status)
    return HttpResponse(status)


def error_response(error: Exception) -> HttpResponse:
    """The answer to a failed request: a status and `{"error": text}`, which is what clients parse.

    Called from an `except` clause at the edge of a request; any other exception is a fault of ours and is logged.
    """
    if isinstance(error, ServerError):
        response = message_response(STATUS[error.code], error.message)
        response.headers = (*JSON_HEADERS, *retry_headers(error))
        return response
    logger.error("an HTTP request failed unexpectedly", exc_info=error)
    return message_response(500, f"internal error ({type(error).__name__}); the server's log has the details")


def retry_headers(error: ServerError, *, is_overload: bool = False) -> tuple[tuple[str, str], ...]:
    """When to try again, if known, and always for overload: in whole seconds, at least 1."""
    after_s = error.retry_after_s
    if after_s is None:
        if not is_overload and error.code is not ErrorCode.OVERLOADED:
            return ()
        after_s = 1.0
    return (("Retry-After", str(min(max(1, ceil(after_s)), _LONGEST_RETRY_S))),)


def message_response(status: int, message: str) -> HttpResponse:
    """An error answer whose status is known."""
    return HttpResponse(status, JSON_HEADERS, (orjson.dumps({"error": error_text(message)}),))


def error_text(message: str) -> str:
    """The message as it can be sent: text that quotes a request may hold a lone surrogate, which has no UTF-8 form."""
    return message.encode("utf-8", "replace").decode()


class PlainErrors(ErrorWriter):
    """`{"error": text}`, as KServe v2 and Triton have it."""

    def failed(self, error: Exception) -> HttpResponse:
        return error_response(error)

    def refused(self, status: int, message: str, code: str | None = None) -> HttpResponse:  # noqa: ARG002  # no codes here
        return message_response(status, message)


PLAIN_ERRORS: Final = PlainErrors()
