"""Errors as Ollama's clients expect them: a status and `{"error": text}`, which is also the last line of a stream."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson

from modelserver.errors import ErrorCode, ServerError
from modelserver.frontends.llm.edge import ApiErrors
from modelserver.frontends.llm.errors import Fault, MediaTypeError, ParameterError, UnknownToolFormatError
from modelserver.protocol.response import JSON_TYPE, STATUS, HttpResponse, error_text, json_response, retry_headers

logger = logging.getLogger(__name__)


class OllamaErrors(ApiErrors):
    """Ollama's form."""

    def failed(self, error: Exception) -> HttpResponse:
        headers = [JSON_TYPE]
        status = 500
        if isinstance(error, ServerError):
            status = _status(error)
            headers += retry_headers(error, is_overload=status == STATUS[ErrorCode.UNAVAILABLE])
        return HttpResponse(status, headers, (orjson.dumps(self.document(error)),))

    def refused(self, status: int, message: str, code: str | None = None) -> HttpResponse:  # noqa: ARG002 - has no codes
        return json_response({"error": error_text(message)}, status)

    def document(self, error: Exception) -> dict[str, Any]:
        if isinstance(error, ServerError):
            return {"error": error_text(error.message)}
        logger.error("an Ollama request failed unexpectedly", exc_info=error)
        return {"error": f"internal error ({type(error).__name__}); the server's log has the details"}

    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:
        if isinstance(error, UnknownToolFormatError):
            # The first clause is Ollama's, which clients match.
            text = f"{document.get('model', 'the model')} does not support tools: {error.message}"
            return ParameterError(text, "tools", Fault.UNSUPPORTED_PARAMETER)
        return error


def _status(error: ServerError) -> int:
    """Ollama answers 400 where others say "unsupported", and 503 where its queue is full."""
    if isinstance(error, MediaTypeError):
        return 415
    if error.code is ErrorCode.UNSUPPORTED:
        return 400
    return STATUS[ErrorCode.UNAVAILABLE] if error.code is ErrorCode.OVERLOADED else STATUS[error.code]
