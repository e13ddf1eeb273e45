"""The access log for `--access-log`: one line for each call of a client, successful or not.

Lines come from the logger `modelserver.auth.access` at level INFO. In JSON each part is a separate field.
"""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar
from typing import Any, Final

from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse, RelayStream
from modelserver.core.tensor import Buffer
from modelserver.errors import ServerError

ACCESS_LOGGER: Final = "modelserver.auth.access"
_logger = logging.getLogger(ACCESS_LOGGER)

# Names and paths come from clients.
_MAX_TEXT_LEN: Final = 200
_TRACE_ID = slice(3, 35)  # of a W3C traceparent, version-traceid-parentid-flags
_TRACEPARENT_LEN: Final = 55

# The call in progress, if the access log is on.
ACCESS: Final[ContextVar[AccessEntry | None]] = ContextVar("modelserver_access", default=None)


class AccessEntry:
    """One call, from its arrival to the line about it. Event loop thread only."""

    __slots__ = (
        "_is_written",
        "_since_ns",
        "key",
        "method",
        "model",
        "num_bytes_in",
        "num_requests",
        "path",
        "peer",
        "protocol",
        "request_id",
        "trace_id",
        "version",
    )

    def __init__(
        self, protocol: str, method: str, path: str, *, peer: str, num_bytes_in: int, trace_parent: str
    ) -> None:
        self._since_ns = time.monotonic_ns()
        self._is_written = False
        self.protocol = protocol
        self.method = method
        self.path = path
        self.peer = peer
        self.num_bytes_in = num_bytes_in
        self.trace_id = trace_id(trace_parent)
        self.num_requests = 0
        # Of the last inference request of the call.
        self.model = ""
        self.version: int | None = None
        self.request_id = ""
        # The name of the API key.
        self.key = ""

    def note(self, request: InFlightRequest) -> None:
        """The call has an inference request."""
        self.num_requests += 1
        self.model = request.model_name
        self.version = request.version
        self.request_id = request.id

    def write(self, status: str, num_bytes_out: int) -> None:
        """Write the line, the first time; `status` is the number of HTTP or the name of gRPC, or `left`."""
        if self._is_written:
            return
        self._is_written = True
        duration_ms = round((time.monotonic_ns() - self._since_ns) / 1e6, 3)
        fields: dict[str, Any] = {
            "protocol": self.protocol,
            "method": self.method[:_MAX_TEXT_LEN],
            "path": self.path[:_MAX_TEXT_LEN],
            "status": status,
            "duration_ms": duration_ms,
            "bytes_in": self.num_bytes_in,
            "bytes_out": num_bytes_out,
            "peer": self.peer,
        }
        fields |= {key: value[:_MAX_TEXT_LEN] for key, value in self._optional() if value}
        write_access(fields)

    def _optional(self) -> tuple[tuple[str, str], ...]:
        return (
            ("model", self.model),
            ("version", "" if self.version is None else str(self.version)),
            ("request_id", self.request_id),
            ("requests", str(self.num_requests) if self.num_requests > 1 else ""),
            ("trace_id", self.trace_id),
            ("key", self.key),
        )


def write_access(fields: dict[str, Any]) -> None:
    """Write a line with these fields, in their order."""
    text = " ".join(f"{key}={_plain(value)}" for key, value in fields.items())
    _logger.info("%s", text, extra={"fields": fields})


def note_request(request: InFlightRequest) -> None:
    """Add an inference request to the call in progress."""
    entry = ACCESS.get()
    if entry is not None:
        entry.note(request)


def note_key(name: str) -> None:
    """Add the name of the API key to the call in progress."""
    entry = ACCESS.get()
    if entry is not None:
        entry.key = name


def trace_id(trace_parent: str) -> str:
    """The trace id of a W3C `traceparent`; empty if it is invalid."""
    return trace_parent[_TRACE_ID] if len(trace_parent) == _TRACEPARENT_LEN else ""


def num_bytes(buffer: Buffer) -> int:
    """The size of a buffer in bytes."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _plain(value: object) -> str:
    """The value as one word: other text is quoted as in JSON."""
    text = str(value)
    is_word = bool(text) and text.isprintable() and not any(letter in text for letter in ' "=\\')
    return text if is_word else json.dumps(text)


# The line per request of `--log-verbose 1`: both protocols get it, because the data plane writes it.
REQUEST_LOGGER: Final = "modelserver.telemetry.request_log"
_request_logger = logging.getLogger(REQUEST_LOGGER)

# Ids and names come from clients.
_LONGEST_TEXT = 100


class LoggedStream(RelayStream):
    """Wraps a request's stream, passes everything on to it, and writes the line with the last response.

    It keeps the values of the line rather than the request, which holds the stream.
    """

    __slots__ = ("_arrival_ns", "_fields", "_head")

    def __init__(self, request: InFlightRequest) -> None:
        super().__init__(request.stream)
        self._head = _head(request)
        self._fields = _fields(request)
        self._arrival_ns = request.arrival_ns

    def deliver(self, response: InferResponse) -> None:
        if self.is_finished:
            return
        self.is_finished = response.is_final
        self._reader.deliver(response)
        if self.is_finished:
            outcome = "ok" if response.error is None else _failure(response.error)
            duration_ms = (time.monotonic_ns() - self._arrival_ns) / 1e6
            _request_logger.debug("%s: %s, %.3f ms", self._head, outcome, duration_ms, extra={"fields": self._fields})


def log_refusal(request: InFlightRequest, error: ServerError) -> None:
    """The line of a request that no model accepted."""
    _request_logger.debug("%s: refused, %s", _head(request), _failure(error), extra={"fields": _fields(request)})


def _head(request: InFlightRequest) -> str:
    version = "" if request.version is None else f" version {request.version}"
    return f"infer {_quoted(request.model_name)}{version} id {_quoted(request.id)} rows {request.rows}"


def _fields(request: InFlightRequest) -> dict[str, str]:
    """The ids that other lines and traces of the same request contain."""
    fields = {"model": request.model_name, "request_id": request.id, "trace_id": trace_id(request.trace_parent)}
    return {key: value[:_LONGEST_TEXT] for key, value in fields.items() if value}


def _quoted(text: str) -> str:
    return repr(text[:_LONGEST_TEXT])


def _failure(error: ServerError) -> str:
    return f"{error.code.value}: {error.message}"
