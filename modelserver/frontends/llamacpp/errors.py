"""Errors as clients of llama.cpp's server expect them: `{"error": {"code", "message", "type"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.errors import ErrorCode, ServerError, UnsupportedError
from modelserver.frontends.llm.errors import MediaTypeError, ParameterError, UsualErrors, read_refusal
from modelserver.protocol.response import STATUS, error_text

_TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "unavailable_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "unavailable_error",
}


class TooLongError(ParameterError):
    """The prompt has more tokens than the model takes."""

    def __init__(self, message: str, num_tokens: int, num_most: int) -> None:
        super().__init__(message, "prompt")
        self.num_tokens = num_tokens
        self.num_most = num_most


class NotSupportedError(UnsupportedError):
    """A route of llama.cpp's server that is not served here."""


class LlamaCppErrors(UsualErrors):
    """The form of llama.cpp's server."""

    api = "llama.cpp's API"

    def form(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:  # noqa: ARG002 - has no codes
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"code": status, "message": error_text(message), "type": kind}}

    def worded(self, error: ServerError) -> tuple[int, dict[str, Any]]:
        status = STATUS[error.code]
        is_unsupported = error.code is ErrorCode.UNSUPPORTED and not isinstance(error, NotSupportedError)
        if is_unsupported or isinstance(error, MediaTypeError):
            status = 400
        found = self.form(status, error.message)
        if isinstance(error, TooLongError):
            found["error"] |= {
                "type": "exceed_context_size_error",
                "n_prompt_tokens": error.num_tokens,
                "n_ctx": error.num_most,
            }
        return status, found

    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:  # noqa: ARG002 - one place is enough
        refusal = read_refusal(error)
        if refusal is None or refusal.sizes is None:
            return error
        return TooLongError(refusal.message, *refusal.sizes)
