"""Telling clients what kind of overload refused them: --overload-statuses."""

from __future__ import annotations

from modelserver.core.relay import RelayStream
from modelserver.core.response import InferResponse
from modelserver.errors import ErrorCode, QueueFullError, QueueTimeoutError, ServerError


class OverloadStream(RelayStream):
    """Gives queue errors codes that name the kind of overload."""

    __slots__ = ()

    def pass_on(self, response: InferResponse) -> InferResponse:
        error = response.error
        if error is not None:
            response.error = tell_overload(error)
        return response


def tell_overload(error: ServerError) -> ServerError:
    """The same error, with the code of its kind; other errors stay as they are."""
    told: ServerError
    if isinstance(error, QueueFullError):
        told = QueueFullError(error.message, code=ErrorCode.OVERLOADED)
    elif isinstance(error, QueueTimeoutError):
        told = QueueTimeoutError(error.message, code=ErrorCode.TIMED_OUT)
    else:
        return error
    told.retry_after_s = error.retry_after_s
    return told
