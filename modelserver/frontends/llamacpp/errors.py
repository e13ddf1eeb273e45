"""Errors as clients of llama.cpp's server expect them: `{"error": {"code", "message", "type"}}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import orjson

from modelserver.errors import ErrorCode, ServerError, UnsupportedError
from modelserver.frontends.llm.edge import ApiErrors
from modelserver.frontends.llm.errors import MediaTypeError, ParameterError, Subject, read_refusal
from modelserver.protocol.response import JSON_TYPE, STATUS, HttpResponse, error_text, json_response, retry_headers

logger = logging.getLogger(__name__)

_TYPES: dict[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "unavailable_error",
    501: "not_supported_error",
    503: "unavailable_error",
    504: "unavailable_error",
}
_TOO_LONG = re.compile(r"\bhas (?:at least )?(\d+) tokens\b.*\bat most (\d+)\b")


class TooLongError(ParameterError):
    """The prompt has more tokens than the model takes."""

    def __init__(self, message: str, num_tokens: int, num_most: int) -> None:
        super().__init__(message, "prompt")
        self.num_tokens = num_tokens
        self.num_most = num_most


class NotSupportedError(UnsupportedError):
    """A route of llama.cpp's server that is not served here."""


class LlamaCppErrors(ApiErrors):
    """The form of llama.cpp's server."""

    def failed(self, error: Exception) -> HttpResponse:
        headers = [JSON_TYPE]
        if isinstance(error, ServerError):
            headers += retry_headers(error)
        return HttpResponse(_status(error), headers, (orjson.dumps(self.document(error)),))

    def refused(self, status: int, message: str, code: str | None = None) -> HttpResponse:  # noqa: ARG002 - has no codes
        return json_response(_document(status, message), status)

    def document(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, TooLongError):
            found = _document(400, error.message)
            found["error"] |= {
                "type": "exceed_context_size_error",
                "n_prompt_tokens": error.num_tokens,
                "n_ctx": error.num_most,
            }
            return found
        if isinstance(error, ServerError):
            return _document(_status(error), error.message)
        logger.error("a llama.cpp request failed unexpectedly", exc_info=error)
        return _document(500, f"internal error ({type(error).__name__}); the server's log has the details")

    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:  # noqa: ARG002 - one place is enough
        refusal = read_refusal(error)
        if refusal is None or refusal.subject is not Subject.PROMPT or not refusal.is_too_long:
            return error
        assert isinstance(error, ServerError), "others are not read"
        numbers = _TOO_LONG.search(error.message)
        return error if numbers is None else TooLongError(error.message, int(numbers[1]), int(numbers[2]))


def _status(error: Exception) -> int:
    if not isinstance(error, ServerError):
        return 500
    if isinstance(error, MediaTypeError) or (
        error.code is ErrorCode.UNSUPPORTED and not isinstance(error, NotSupportedError)
    ):
        return 400
    return STATUS[error.code]


def _document(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"code": status, "message": error_text(message), "type": kind}}
