"""Errors as clients of text-generation-inference expect them: a status, and `{"error": text, "error_type": word}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import orjson

from modelserver.errors import ErrorCode, QueueFullError, ServerError
from modelserver.frontends.llm.edge import ApiErrors
from modelserver.frontends.llm.errors import MediaTypeError, ParameterError, Subject, read_refusal
from modelserver.protocol.response import JSON_TYPE, STATUS, HttpResponse, error_text, json_response, retry_headers

logger = logging.getLogger(__name__)

_VALIDATION, _GENERATION, _OVERLOADED = "validation", "generation", "overloaded"
# Status and `error_type`. The codes that are not here are the client's fault: 422, validation.
_KINDS: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.INTERNAL: (424, _GENERATION),
    ErrorCode.OVERLOADED: (429, _OVERLOADED),
    ErrorCode.CANCELLED: (500, "incomplete_generation"),
    ErrorCode.UNAVAILABLE: (503, "unavailable"),
    ErrorCode.TIMED_OUT: (504, "timeout"),
    ErrorCode.NOT_FOUND: (404, "not_found"),
    ErrorCode.PAYLOAD_TOO_LARGE: (413, _VALIDATION),
    ErrorCode.UNAUTHENTICATED: (401, "unauthenticated"),
    ErrorCode.PERMISSION_DENIED: (403, "permission_denied"),
}
_INVALID = (422, _VALIDATION)
# The beginnings of TGI's sentences.
_PREFIXES = {
    _VALIDATION: "Input validation error: ",
    _GENERATION: "Request failed during generation: ",
    _OVERLOADED: "Model is overloaded: ",
    "incomplete_generation": "Incomplete generation: ",
}
_TOO_LONG = re.compile(r"\bhas (?:at least )?(\d+) tokens\b.*\bat most (\d+)\b")
# Of requests that reached no handler.
_WORDS = {401: "unauthenticated", 403: "permission_denied", 404: "not_found", 405: "method_not_allowed"}


class TgiErrors(ApiErrors):
    """The form of TGI."""

    def failed(self, error: Exception) -> HttpResponse:
        headers = [JSON_TYPE]
        status = 500
        if isinstance(error, ServerError):
            status, kind = _kind(error)
            headers += retry_headers(error, is_overload=kind == _OVERLOADED)
        return HttpResponse(status, headers, (orjson.dumps(self.document(error)),))

    def refused(self, status: int, message: str, code: str | None = None) -> HttpResponse:
        return json_response({"error": error_text(message), "error_type": code or _WORDS.get(status, "http")}, status)

    def document(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, ServerError):
            _, kind = _kind(error)
            return {"error": error_text(_PREFIXES.get(kind, "") + error.message), "error_type": kind}
        logger.error("a TGI request failed unexpectedly", exc_info=error)
        text = f"internal error ({type(error).__name__}); the server's log has the details"
        return {"error": text, "error_type": "internal"}

    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:  # noqa: ARG002 - one place is enough
        refusal = read_refusal(error)
        if refusal is None or refusal.subject is not Subject.PROMPT or not refusal.is_too_long:
            return error
        assert isinstance(error, ServerError), "others are not read"
        numbers = _TOO_LONG.search(error.message)
        if numbers is None:
            return error
        # Clients match this sentence and shorten the prompt.
        text = f"`inputs` must have less than {int(numbers[2]) + 1} tokens. Given: {numbers[1]}"
        return ParameterError(text, "inputs")


def _kind(error: ServerError) -> tuple[int, str]:
    """The status and the `error_type` of an error."""
    if isinstance(error, MediaTypeError):
        return 415, _VALIDATION
    if isinstance(error, QueueFullError):
        return STATUS[ErrorCode.OVERLOADED], _OVERLOADED
    return _KINDS.get(error.code, _INVALID)
