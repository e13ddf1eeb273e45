"""Errors as Ollama's clients expect them: a status and `{"error": text}`, which is also the last line of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelserver.errors import ErrorCode, ServerError
from modelserver.frontends.llm.errors import Fault, MediaTypeError, ParameterError, UnknownToolFormatError, UsualErrors
from modelserver.protocol.response import STATUS, error_text


class OllamaErrors(UsualErrors):
    """Ollama's form: 400 where others say "unsupported", and 503 where its queue is full."""

    api = "Ollama's API"
    overload_status = STATUS[ErrorCode.UNAVAILABLE]

    def form(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:  # noqa: ARG002 - the text alone
        return {"error": error_text(message)}

    def worded(self, error: ServerError) -> tuple[int, dict[str, Any]]:
        status = STATUS[error.code]
        if isinstance(error, MediaTypeError):
            status = 415
        elif error.code is ErrorCode.UNSUPPORTED:
            status = 400
        elif error.code is ErrorCode.OVERLOADED:
            status = self.overload_status
        return status, self.form(status, error.message)

    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:
        if isinstance(error, UnknownToolFormatError):
            # The first clause is Ollama's, which clients match.
            text = f"{document.get('model', 'the model')} does not support tools: {error.message}"
            return ParameterError(text, "tools", Fault.UNSUPPORTED_PARAMETER)
        return error
