"""What every API of language models is made of: calls that become events, and the framing of answers.

An API imports what it needs from here and brings a reader (its document -> `GenerateCall`), an `EventWriter` (events ->
its documents) and `ApiErrors`; docs/add-a-language-model-api.md builds one.
"""

from __future__ import annotations

from modelserver.frontends.http.framing import NDJSON, SSE, Framing, PreparedFrame
from modelserver.frontends.llm.answering import EventWriter, News, Prepared, answer, prepare
from modelserver.frontends.llm.call import GenerateCall
from modelserver.frontends.llm.choices import Choice, Said, Usage
from modelserver.frontends.llm.edge import Call, CallEdge
from modelserver.frontends.llm.errors import (
    ApiErrors,
    Fault,
    MediaTypeError,
    ParameterError,
    Subject,
    UnknownModelError,
    UnknownToolFormatError,
    read_refusal,
)
from modelserver.frontends.llm.events import Finish, Reasoning, Text, Tokens, ToolDelta, ToolEnd
from modelserver.frontends.llm.fields import Fields, Range
from modelserver.frontends.llm.models import LanguageModel, find_model, known_models
from modelserver.frontends.llm.tools import Tools, ToolUse

__all__ = [
    "NDJSON",
    "SSE",
    "ApiErrors",
    "Call",
    "CallEdge",
    "Choice",
    "EventWriter",
    "Fault",
    "Fields",
    "Finish",
    "Framing",
    "GenerateCall",
    "LanguageModel",
    "MediaTypeError",
    "News",
    "ParameterError",
    "Prepared",
    "PreparedFrame",
    "Range",
    "Reasoning",
    "Said",
    "Subject",
    "Text",
    "Tokens",
    "ToolDelta",
    "ToolEnd",
    "ToolUse",
    "Tools",
    "UnknownModelError",
    "UnknownToolFormatError",
    "Usage",
    "answer",
    "find_model",
    "known_models",
    "prepare",
    "read_refusal",
]
