"""How a call to another server failed: for its caller, for the health of the endpoint, and for whoever may retry it."""

from __future__ import annotations

from modelserver.endpoints.endpoint import Outcome
from modelserver.errors import ErrorCode, ServerError
from modelserver.protocol.grpc_status import Status

# By the status of an answer: what the error is for our own caller. Keys of ours that another server refuses are a
# fault of the configuration here, not of the caller.
_HTTP_CODES = {
    400: ErrorCode.INVALID_ARGUMENT,
    401: ErrorCode.INTERNAL,
    403: ErrorCode.INTERNAL,
    404: ErrorCode.NOT_FOUND,
    408: ErrorCode.TIMED_OUT,
    409: ErrorCode.INVALID_ARGUMENT,
    413: ErrorCode.PAYLOAD_TOO_LARGE,
    422: ErrorCode.INVALID_ARGUMENT,
    429: ErrorCode.OVERLOADED,
    501: ErrorCode.UNSUPPORTED,
    502: ErrorCode.UNAVAILABLE,
    503: ErrorCode.UNAVAILABLE,
    504: ErrorCode.TIMED_OUT,
    529: ErrorCode.OVERLOADED,
}
_GRPC_CODES = {
    Status.CANCELLED: ErrorCode.CANCELLED,
    Status.UNKNOWN: ErrorCode.UNKNOWN,
    Status.INVALID_ARGUMENT: ErrorCode.INVALID_ARGUMENT,
    Status.DEADLINE_EXCEEDED: ErrorCode.TIMED_OUT,
    Status.NOT_FOUND: ErrorCode.NOT_FOUND,
    Status.ALREADY_EXISTS: ErrorCode.ALREADY_EXISTS,
    Status.RESOURCE_EXHAUSTED: ErrorCode.OVERLOADED,
    Status.UNIMPLEMENTED: ErrorCode.UNSUPPORTED,
    Status.UNAVAILABLE: ErrorCode.UNAVAILABLE,
}
_OUTCOMES = {
    ErrorCode.INTERNAL: Outcome.SERVER_ERROR,
    ErrorCode.UNAVAILABLE: Outcome.SERVER_ERROR,
    ErrorCode.OVERLOADED: Outcome.OVERLOADED,
    ErrorCode.TIMED_OUT: Outcome.TIMED_OUT,
}
# Statuses that say that no model has seen the request.
_UNPROCESSED = frozenset({429, 503, 529})


class CallError(ServerError):
    """A call that failed. `is_unprocessed`: the other server has not begun to work on it, so it may be sent again."""

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode = ErrorCode.UNAVAILABLE,
        outcome: Outcome = Outcome.LOST,
        is_unprocessed: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.outcome = outcome
        self.is_unprocessed = is_unprocessed
        self.retry_after_s = retry_after_s
        # Of an error answer over HTTP.
        self.body = b""


def not_connected(message: str) -> CallError:
    """No connection could be opened."""
    return CallError(message, outcome=Outcome.CONNECT_FAILED, is_unprocessed=True)


def http_error(status: int, message: str, retry_after_s: float | None = None) -> CallError:
    """The error that an answer of HTTP stands for."""
    code = _HTTP_CODES.get(status, ErrorCode.INTERNAL if status >= 500 else ErrorCode.INVALID_ARGUMENT)
    outcome = _OUTCOMES.get(code, Outcome.CLIENT_ERROR) if status not in (401, 403) else Outcome.CLIENT_ERROR
    if outcome is Outcome.SERVER_ERROR and status == 503 and retry_after_s is not None:
        outcome = Outcome.OVERLOADED
    return CallError(
        message,
        code=code,
        outcome=outcome,
        is_unprocessed=status in _UNPROCESSED,
        retry_after_s=retry_after_s,
    )


def grpc_error(status: int, message: str, retry_after_s: float | None = None) -> CallError:
    """The error that the status of a gRPC call stands for."""
    try:
        code = _GRPC_CODES.get(Status(status), ErrorCode.INTERNAL)
    except ValueError:
        code = ErrorCode.UNKNOWN
    is_key = status in (Status.UNAUTHENTICATED, Status.PERMISSION_DENIED)
    outcome = Outcome.CLIENT_ERROR if is_key else _OUTCOMES.get(code, Outcome.CLIENT_ERROR)
    if code is ErrorCode.UNAVAILABLE and retry_after_s is not None:
        outcome = Outcome.OVERLOADED
    is_unprocessed = status in (Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED)
    return CallError(message, code=code, outcome=outcome, is_unprocessed=is_unprocessed, retry_after_s=retry_after_s)
