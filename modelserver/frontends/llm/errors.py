"""What can be wrong with a request to a language model, before any API has worded it.

Each API says in its own errors where in its documents the fault is (`ParameterError.param`) and what it calls it.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from modelserver.errors import ErrorCode, InvalidArgumentError, NotFoundError, ServerError

# Models refuse in words: these begin with the parameter, or say that the prompt is too long.
_PARAMETER = re.compile(r"(?:unknown )?(?:parameter|input) '(?P<name>[\w.\[\]]+)'|(?P<message>messages\[\d+\])")
_PROMPT = re.compile(r"the (?:prompt|text to (?:embed|classify)) (?P<too_long>has (?:at least )?\d+ tokens\b)?")
_PROMPT_INPUTS = ("text_input", "input_ids", "image")
_TEMPLATE = "the model's chat template refuses these messages"
_STRUCTURE = "structured output: "


class Fault(enum.Enum):
    """What is wrong with a parameter. APIs have words of their own for it."""

    MISSING = enum.auto()
    INVALID_VALUE = enum.auto()
    UNSUPPORTED_PARAMETER = enum.auto()
    UNSUPPORTED_CONTENT = enum.auto()
    UNSUPPORTED_MODEL = enum.auto()
    TOO_LONG = enum.auto()


class ParameterError(InvalidArgumentError):
    """A parameter of the request is wrong; `param` is its path in the document, such as `messages[0].role`."""

    def __init__(self, message: str, param: str | None, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.fault = fault


class UnknownModelError(NotFoundError):
    """The request names a model that does not serve here."""


class MediaTypeError(InvalidArgumentError):
    """The body is said to be something else than JSON."""


class UnknownToolFormatError(InvalidArgumentError):
    """The model may choose tools, and its config does not say how it writes calls. It can still be made to call one."""


class Subject(enum.Enum):
    """What of a request a model refuses."""

    PARAMETER = enum.auto()
    PROMPT = enum.auto()
    STRUCTURE = enum.auto()


@dataclass(frozen=True, slots=True)
class Refusal:
    """`name` is that of a PARAMETER, as models know it."""

    subject: Subject
    name: str = ""
    is_too_long: bool = False


def read_refusal(error: Exception) -> Refusal | None:
    """What of the request a model's error is about, where its words say so; None for any other error."""
    if not isinstance(error, ServerError) or error.code is not ErrorCode.INVALID_ARGUMENT:
        return None
    if isinstance(error, ParameterError | MediaTypeError | UnknownToolFormatError):
        return None
    match = _PARAMETER.match(error.message)
    if match is not None:
        name = match["name"] or match["message"]
        return Refusal(Subject.PROMPT) if name in _PROMPT_INPUTS else Refusal(Subject.PARAMETER, name)
    if error.message.startswith(_TEMPLATE):
        return Refusal(Subject.PROMPT)
    if error.message.startswith(_STRUCTURE):
        return Refusal(Subject.STRUCTURE)
    match = _PROMPT.match(error.message)
    return None if match is None else Refusal(Subject.PROMPT, is_too_long=bool(match["too_long"]))
