"""The one table from error code to HTTP status, and the body that every error has."""

from __future__ import annotations

import logging

import orjson

from modelserver.errors import ErrorCode, ServerError
from modelserver.frontends.http.exchange import HttpResponse

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

JSON_TYPE = ("Content-Type", "application/json")
JSON_HEADERS = (JSON_TYPE,)
# How long a client that was refused for overload should wait: queues empty within milliseconds, and 0 is not allowed.
_RETRY_AFTER_S = "1"


def json_response(document: object, status: int = 200) -> HttpResponse:
    """`document` as an application/json answer."""
    return HttpResponse(status, JSON_HEADERS, (orjson.dumps(document),))


def error_response(error: Exception) -> HttpResponse:
    """The answer to a failed request: a status and `{"error": text}`, which is what clients parse.

    Called from an `except` clause at the edge of a request; what is not a ServerError is our fault and logged.
    """
    if isinstance(error, ServerError):
        response = message_response(STATUS[error.code], error.message)
        if error.code is ErrorCode.OVERLOADED:
            response.headers = (*JSON_HEADERS, ("Retry-After", _RETRY_AFTER_S))
        return response
    logger.error("an HTTP request failed unexpectedly", exc_info=error)
    return message_response(500, f"internal error ({type(error).__name__}); the server's log has the details")


def message_response(status: int, message: str) -> HttpResponse:
    """An error answer whose status is known."""
    return HttpResponse(status, JSON_HEADERS, (orjson.dumps({"error": error_text(message)}),))


def error_text(message: str) -> str:
    """The message as it can be sent: text that quotes a request may hold a lone surrogate, which has no UTF-8 form."""
    return message.encode("utf-8", "replace").decode()
