"""Errors as Anthropic's clients expect them: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import orjson

from modelserver.errors import ErrorCode, QueueFullError, ServerError
from modelserver.frontends.llm.edge import ApiErrors
from modelserver.frontends.llm.errors import (
    Fault,
    MediaTypeError,
    ParameterError,
    Subject,
    UnknownToolFormatError,
    read_refusal,
)
from modelserver.protocol.response import JSON_TYPE, STATUS, HttpResponse, error_text, json_response, retry_headers

logger = logging.getLogger(__name__)

# Anthropic's own status for a server that has too much to do. Its clients try again after it, and after 429 and 5xx.
_OVERLOADED = 529
_TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
_TOO_LONG = re.compile(r"\bhas (?:at least )?(\d+) tokens\b.*\bat most (\d+)\b")


class AnthropicErrors(ApiErrors):
    """Anthropic's form."""

    def failed(self, error: Exception) -> HttpResponse:
        headers = [JSON_TYPE]
        if isinstance(error, ServerError):
            headers += retry_headers(error)
        return HttpResponse(_status(error), headers, (orjson.dumps(self.document(error)),))

    def refused(self, status: int, message: str, code: str | None = None) -> HttpResponse:  # noqa: ARG002 - has no codes
        return json_response(_document(status, message), status)

    def document(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, ServerError):
            return _document(_status(error), error.message)
        logger.error("an Anthropic request failed unexpectedly", exc_info=error)
        return _document(500, f"internal error ({type(error).__name__}); the server's log has the details")

    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:  # noqa: ARG002 - one place is enough
        if isinstance(error, UnknownToolFormatError):
            return ParameterError(f"tools: {error.message}", "tools", Fault.UNSUPPORTED_PARAMETER)
        refusal = read_refusal(error)
        if refusal is None or refusal.subject is not Subject.PROMPT or not refusal.is_too_long:
            return error
        assert isinstance(error, ServerError), "others are not read"
        numbers = _TOO_LONG.search(error.message)
        # Clients that see this sentence shorten the conversation.
        text = f"prompt is too long: {numbers[1]} tokens > {numbers[2]} maximum" if numbers else "prompt is too long"
        return ParameterError(f"{text} ({error.message})", "messages", Fault.TOO_LONG)


def _status(error: Exception) -> int:
    if not isinstance(error, ServerError):
        return 500
    if isinstance(error, QueueFullError):
        return _OVERLOADED
    if isinstance(error, MediaTypeError) or error.code in (ErrorCode.UNSUPPORTED, ErrorCode.CANCELLED):
        return 400
    return STATUS[error.code]


def _document(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error_text(message)}}
