"""Every error that a client or an operator can meet, with a transport-neutral code.

    ServerError
     ├─ InvalidArgumentError      the caller sent something that can never work
     │   ├─ PayloadTooLargeError  ... because it is over a configured limit
     │   └─ ConfigError           ... in a config.pbtxt; carries every problem found
     ├─ NotFoundError             no such model, version, route or file
     ├─ AlreadyExistsError        a name is taken
     ├─ UnavailableError          not now: not ready, shutting down
     │   ├─ QueueFullError        ... because the queue is at its limit
     │   ├─ QueueTimeoutError     ... because its time ran out before it was executed
     │   ├─ QuotaError            ... because the caller has used up its quota for now
     │   └─ LoadOnDemandError      ... because the model is loaded on demand and is not in memory
     ├─ UnsupportedError          the request is valid, the model or server cannot do it
     ├─ CancelledError            the caller went away or asked to stop
     ├─ UnauthenticatedError      the call has no API key, or an unknown one
     ├─ PermissionDeniedError     the API key is known but does not allow this
     └─ InternalError             our fault, or a backend's

Each frontend maps `ErrorCode` to a status in one table; the layers below know no statuses.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable


class ErrorCode(enum.Enum):
    """What kind of failure it is; Triton's codes, one for size limits, two for overload and two for API keys."""

    UNKNOWN = "unknown"
    INTERNAL = "internal"
    NOT_FOUND = "not_found"
    INVALID_ARGUMENT = "invalid_argument"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNAVAILABLE = "unavailable"
    UNSUPPORTED = "unsupported"
    ALREADY_EXISTS = "already_exists"
    CANCELLED = "cancelled"
    # The codes of the two queue errors with --overload-statuses; without the flag both are UNAVAILABLE, as in Triton.
    OVERLOADED = "overloaded"
    TIMED_OUT = "timed_out"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"


# The reason of everything that is refused because the server stops.
SHUTTING_DOWN = "the server is shutting down"


class ServerError(Exception):
    """Base of all errors that are answered to a caller; `message` is safe to show.

    `retry_after_s` says when to try again, if that is known; frontends pass it on.
    """

    code = ErrorCode.UNKNOWN
    retry_after_s: float | None = None

    def __init__(self, message: str, *, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code

    def name_request(self, model_name: str, request_id: str) -> None:
        """Add the request and the model that this is about, unless the message names them already.

        Decoders do not know the model and say "for the model" where Triton's sentence has its name.
        """
        if model_name:
            self.message = self.message.replace(" for the model", f" for model '{model_name:.200}'", 1)
        names = {"model": model_name, "request id": request_id}
        missing = [f"{what} {name[:200]!r}" for what, name in names.items() if name and f"'{name}'" not in self.message]
        if missing:
            self.message = f"{self.message} ({', '.join(missing)})"

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Callable[..., ServerError], tuple[object, ...]]:
        """Make every subclass picklable: a pool that cannot unpickle an error of its worker waits for ever."""
        return _rebuilt, (type(self), self.args, dict(self.__dict__))


def _rebuilt(kind: type[ServerError], arguments: tuple[object, ...], attributes: dict[str, object]) -> ServerError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


class InvalidArgumentError(ServerError):
    """The request or option is wrong as written; sending it again cannot help."""

    code = ErrorCode.INVALID_ARGUMENT


class PayloadTooLargeError(InvalidArgumentError):
    """A configured limit on size, depth or count was exceeded; the message names the flag."""

    code = ErrorCode.PAYLOAD_TOO_LARGE


class ConfigError(InvalidArgumentError):
    """A model config is invalid; `problems` holds one line per problem, all of them."""

    def __init__(self, message: str, problems: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems


class NotFoundError(ServerError):
    """The named thing does not exist."""

    code = ErrorCode.NOT_FOUND


class UnloadedError(NotFoundError):
    """The named model is known and was taken away; it comes back only when it is loaded again."""


class AlreadyExistsError(ServerError):
    """The name is already in use."""

    code = ErrorCode.ALREADY_EXISTS


class UnavailableError(ServerError):
    """Not possible now, perhaps later."""

    code = ErrorCode.UNAVAILABLE


class QueueFullError(UnavailableError):
    """The queue is full: its policy allows no more waiting requests."""


class QueueTimeoutError(UnavailableError):
    """The request's queue timeout or its deadline expired before it was executed, or would have expired by then."""


class QuotaError(UnavailableError):
    """The caller has used up its quota for now: requests or tokens per second, or requests in flight."""

    code = ErrorCode.OVERLOADED


class LoadOnDemandError(UnavailableError):
    """The model is not in memory and is loaded on demand: callers that want it await `load()` and ask again.

    `load` returns when the model serves, and raises the ServerError that prevents the load.
    """

    def __init__(self, message: str, load: Callable[[], Awaitable[None]]) -> None:
        super().__init__(message)
        self.load = load


class UnsupportedError(ServerError):
    """Valid, but not something this model, mode or build does."""

    code = ErrorCode.UNSUPPORTED


class CancelledError(ServerError):
    """The request was cancelled before it had its answer."""

    code = ErrorCode.CANCELLED


class UnauthenticatedError(ServerError):
    """The call has no API key, or an unknown one."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDeniedError(ServerError):
    """The API key is known but does not allow this."""

    code = ErrorCode.PERMISSION_DENIED


class InternalError(ServerError):
    """A fault on our side or in a backend."""

    code = ErrorCode.INTERNAL
