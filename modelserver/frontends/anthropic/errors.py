"""Errors as Anthropic's clients expect them: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.errors import ErrorCode, QueueFullError, ServerError
from modelserver.frontends.llm.errors import (
    Fault,
    MediaTypeError,
    ParameterError,
    UnknownToolFormatError,
    UsualErrors,
    read_refusal,
)
from modelserver.protocol.response import STATUS, error_text

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


class AnthropicErrors(UsualErrors):
    """Anthropic's form."""

    api = "Anthropic's API"

    def form(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:  # noqa: ARG002 - has no codes
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": error_text(message)}}

    def worded(self, error: ServerError) -> tuple[int, dict[str, Any]]:
        if isinstance(error, QueueFullError):
            status = _OVERLOADED
        elif isinstance(error, MediaTypeError) or error.code in (ErrorCode.UNSUPPORTED, ErrorCode.CANCELLED):
            status = 400
        else:
            status = STATUS[error.code]
        return status, self.form(status, error.message)

    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:  # noqa: ARG002 - one place is enough
        if isinstance(error, UnknownToolFormatError):
            return ParameterError(f"tools: {error.message}", "tools", Fault.UNSUPPORTED_PARAMETER)
        refusal = read_refusal(error)
        if refusal is None or not refusal.is_too_long:
            return error
        # Clients that see this sentence shorten the conversation.
        sizes = refusal.sizes
        text = "prompt is too long" if sizes is None else f"prompt is too long: {sizes[0]} tokens > {sizes[1]} maximum"
        return ParameterError(f"{text} ({refusal.message})", "messages", Fault.TOO_LONG)
