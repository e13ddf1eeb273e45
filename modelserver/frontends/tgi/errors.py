"""Errors as clients of text-generation-inference expect them: a status, and `{"error": text, "error_type": word}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.errors import ErrorCode, QueueFullError, ServerError
from modelserver.frontends.llm.errors import MediaTypeError, ParameterError, UsualErrors, read_refusal
from modelserver.protocol.response import STATUS, error_text

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
# Of requests that reached no handler, and of faults of ours.
_WORDS = {
    401: "unauthenticated",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    500: "internal",
}


class TgiErrors(UsualErrors):
    """The form of TGI."""

    api = "TGI's API"

    def form(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        return {"error": error_text(message), "error_type": code or _WORDS.get(status, "http")}

    def worded(self, error: ServerError) -> tuple[int, dict[str, Any]]:
        status, kind = _kind(error)
        return status, self.form(status, _PREFIXES.get(kind, "") + error.message, kind)

    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:  # noqa: ARG002 - one place is enough
        refusal = read_refusal(error)
        if refusal is None or refusal.sizes is None:
            return error
        num_tokens, num_most = refusal.sizes
        # Clients match this sentence and shorten the prompt.
        return ParameterError(f"`inputs` must have less than {num_most + 1} tokens. Given: {num_tokens}", "inputs")


def _kind(error: ServerError) -> tuple[int, str]:
    """The status and the `error_type` of an error."""
    if isinstance(error, MediaTypeError):
        return 415, _VALIDATION
    if isinstance(error, QueueFullError):
        return STATUS[ErrorCode.OVERLOADED], _OVERLOADED
    return _KINDS.get(error.code, _INVALID)
