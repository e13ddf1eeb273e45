"""A line per request, for `--log-verbose 1`: both protocols get it, because the data plane writes it."""

from __future__ import annotations

import logging
import time

from modelserver.core.relay import RelayStream
from modelserver.core.request import InFlightRequest
from modelserver.core.response import InferResponse
from modelserver.errors import ServerError
from modelserver.telemetry.access_log import trace_id

logger = logging.getLogger(__name__)

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
            logger.debug("%s: %s, %.3f ms", self._head, outcome, duration_ms, extra={"fields": self._fields})


def log_refusal(request: InFlightRequest, error: ServerError) -> None:
    """The line of a request that no model accepted."""
    logger.debug("%s: refused, %s", _head(request), _failure(error), extra={"fields": _fields(request)})


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
