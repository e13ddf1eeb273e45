"""The errors of Triton's in-process API."""

from __future__ import annotations

from modelserver.errors import ErrorCode, ServerError


class TritonError(Exception):
    """Base of the errors that the server answers with."""


class UnknownError(TritonError):
    pass


class InternalError(TritonError):
    pass


class NotFoundError(TritonError):
    pass


class InvalidArgumentError(TritonError):
    pass


class UnavailableError(TritonError):
    pass


class UnsupportedError(TritonError):
    pass


class AlreadyExistsError(TritonError):
    pass


_BY_CODE: dict[ErrorCode, type[TritonError]] = {
    ErrorCode.INTERNAL: InternalError,
    ErrorCode.NOT_FOUND: NotFoundError,
    ErrorCode.INVALID_ARGUMENT: InvalidArgumentError,
    ErrorCode.PAYLOAD_TOO_LARGE: InvalidArgumentError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.OVERLOADED: UnavailableError,
    ErrorCode.TIMED_OUT: UnavailableError,
    ErrorCode.UNSUPPORTED: UnsupportedError,
    ErrorCode.ALREADY_EXISTS: AlreadyExistsError,
}


def translated(error: ServerError) -> TritonError:
    """The error by its name here; a cancelled request is an UnknownError, for which Triton has no name either."""
    return _BY_CODE.get(error.code, UnknownError)(error.message)
