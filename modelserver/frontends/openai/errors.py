"""Errors as OpenAI's clients expect them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelserver.errors import ErrorCode, QueueFullError, ServerError
from modelserver.frontends.llm.errors import (
    Fault,
    MediaTypeError,
    ParameterError,
    Subject,
    UnknownModelError,
    UnknownToolFormatError,
    UsualErrors,
    read_refusal,
)
from modelserver.protocol.response import HttpResponse, error_text

_INVALID, _OVERLOADED, _FAILED = "invalid_request_error", "rate_limit_error", "server_error"

# What a request may have said it by; forced calls of tools are the last guess.
_STRUCTURES = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "functions",
    "tools",
)
_PROMPTS = ("messages", "prompt", "input", "tokens", "documents", "texts", "text_2", "inputs")
# Inputs of models that have another name in OpenAI's API.
_FIELDS = {"audio": "file"}
# OpenAI's codes, and those of other servers where it has none.
_CODES: dict[Fault, str] = {
    Fault.MISSING: "missing_required_parameter",
    Fault.INVALID_VALUE: "invalid_value",
    Fault.UNSUPPORTED_PARAMETER: "unsupported_parameter",
    Fault.UNSUPPORTED_CONTENT: "unsupported_content",
    Fault.UNSUPPORTED_MODEL: "unsupported_model",
    Fault.TOO_LONG: "context_length_exceeded",
}


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """What a client sees of a kind of error; `code` is OpenAI's machine-readable reason, if it has one."""

    status: int
    type: str
    code: str | None = None


# Clients repeat a call by themselves after 408, 409, 429 and 5xx: what cannot help to repeat must be another 4xx.
KINDS: dict[ErrorCode, ErrorKind] = {
    ErrorCode.UNKNOWN: ErrorKind(400, _INVALID),
    ErrorCode.INTERNAL: ErrorKind(500, _FAILED),
    ErrorCode.NOT_FOUND: ErrorKind(404, _INVALID, "not_found"),
    ErrorCode.INVALID_ARGUMENT: ErrorKind(400, _INVALID),
    ErrorCode.PAYLOAD_TOO_LARGE: ErrorKind(413, _INVALID, "request_too_large"),
    ErrorCode.UNAVAILABLE: ErrorKind(503, _FAILED, "unavailable"),
    ErrorCode.UNSUPPORTED: ErrorKind(400, _INVALID, "unsupported"),
    ErrorCode.ALREADY_EXISTS: ErrorKind(400, _INVALID),
    ErrorCode.CANCELLED: ErrorKind(499, _FAILED, "cancelled"),
    ErrorCode.OVERLOADED: ErrorKind(429, _OVERLOADED, "rate_limit_exceeded"),
    ErrorCode.TIMED_OUT: ErrorKind(504, _FAILED, "timeout"),
    ErrorCode.UNAUTHENTICATED: ErrorKind(401, _INVALID, "invalid_api_key"),
    ErrorCode.PERMISSION_DENIED: ErrorKind(403, _INVALID, "permission_denied"),
}


class OpenAiErrors(UsualErrors):
    """OpenAI's form."""

    api = "OpenAI's API"

    def form(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        return _document(message, ErrorKind(status, _INVALID if status < 500 else _FAILED, code))

    def worded(self, error: ServerError) -> tuple[int, dict[str, Any]]:
        kind, param = KINDS[error.code], None
        if isinstance(error, ParameterError):
            kind = ErrorKind(kind.status, kind.type, None if error.fault is None else _CODES[error.fault])
            param = error.param
        elif isinstance(error, UnknownModelError):
            kind, param = ErrorKind(404, _INVALID, "model_not_found"), "model"
        elif isinstance(error, MediaTypeError):
            kind = ErrorKind(415, _INVALID, "unsupported_media_type")
        elif isinstance(error, QueueFullError):
            kind = KINDS[ErrorCode.OVERLOADED]
        return kind.status, _document(error.message, kind, param)

    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:
        if isinstance(error, UnknownToolFormatError):
            text = f"{error.message}; use tool_choice required, a named function, or none"
            return ParameterError(text, "tool_choice", Fault.UNSUPPORTED_PARAMETER)
        refusal = read_refusal(error)
        if refusal is None:
            return error
        if refusal.subject is Subject.PARAMETER:
            return ParameterError(refusal.message, _FIELDS.get(refusal.name, refusal.name))
        if refusal.subject is Subject.STRUCTURE:
            return ParameterError(refusal.message, next((name for name in _STRUCTURES if document.get(name)), None))
        prompt = next((name for name in _PROMPTS if name in document), None)
        return ParameterError(refusal.message, prompt, Fault.TOO_LONG if refusal.is_too_long else None)

    def restricted(self, header: str) -> HttpResponse:
        """401 where the header is the one in which clients send their API key, as they expect it."""
        if header == "authorization":
            return self.refused(401, "the API key is missing or wrong", "invalid_api_key")
        return super().restricted(header)


def _document(message: str, kind: ErrorKind, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": error_text(message), "type": kind.type, "param": param, "code": kind.code}}
