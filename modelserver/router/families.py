"""How the families of calls write errors, by the paths of their requests."""

from __future__ import annotations

from typing import Final

import orjson

from modelserver.errors import UnavailableError
from modelserver.frontends.anthropic.errors import AnthropicErrors
from modelserver.frontends.llm.errors import ApiErrors
from modelserver.frontends.ollama.errors import OllamaErrors
from modelserver.frontends.openai.errors import OpenAiErrors
from modelserver.frontends.tgi.errors import TgiErrors
from modelserver.protocol.response import PLAIN_ERRORS, ErrorWriter, error_text

_ANTHROPIC: Final = AnthropicErrors()
_OLLAMA: Final = OllamaErrors()
_OPENAI: Final = OpenAiErrors()
_TGI: Final = TgiErrors()
_TGI_PATHS: Final = frozenset({"/", "/generate", "/generate_stream", "/info", "/tokenize"})


def _api_errors(path: str) -> ApiErrors | None:
    if path.startswith("/v1/"):
        return _ANTHROPIC if path.startswith("/v1/messages") else _OPENAI
    if path.startswith("/api/"):
        return _OLLAMA
    return _TGI if path in _TGI_PATHS else None


def errors_of(path: str) -> ErrorWriter:
    """The form of errors of the family that answers for the path."""
    return _api_errors(path) or PLAIN_ERRORS


def error_event(path: str, text: str) -> bytes:
    """The error as the last event of a streamed answer: of server-sent events, or a line of JSON in Ollama's API."""
    errors = _api_errors(path)
    document = {"error": error_text(text)} if errors is None else errors.document(UnavailableError(text))
    content = orjson.dumps(document)
    if errors is _OLLAMA:
        return content + b"\n"
    return (b"event: error\n" if errors is _ANTHROPIC else b"") + b"data: " + content + b"\n\n"
