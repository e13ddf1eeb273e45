"""What can be wrong with a request to a language model, before any API has worded it; and what the APIs share in
wording it (`UsualErrors`).

Each API says in its own errors where in its documents the fault is (`ParameterError.param`) and what it calls it.
"""

from __future__ import annotations

import abc
import enum
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from modelserver.errors import ErrorCode, InvalidArgumentError, NotFoundError, ServerError
from modelserver.protocol.response import JSON_TYPE, ErrorWriter, HttpResponse, json_response, retry_headers

logger = logging.getLogger(__name__)

# Models refuse in words: these begin with the parameter, or say that the prompt is too long.
_PARAMETER = re.compile(r"(?:unknown )?(?:parameter|input) '(?P<name>[\w.\[\]]+)'|(?P<message>messages\[\d+\])")
_PROMPT = re.compile(r"the (?:prompt|text to (?:embed|classify)) (?P<too_long>has (?:at least )?\d+ tokens\b)?")
_TOO_LONG = re.compile(r"\bhas (?:at least )?(\d+) tokens\b.*\bat most (\d+)\b")
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
    """`name` is that of a PARAMETER, as models know it.

    `sizes` are the tokens of a prompt that is too long, and the most that the model takes, if it says them.
    """

    subject: Subject
    message: str
    name: str = ""
    is_too_long: bool = False
    sizes: tuple[int, int] | None = None


def read_refusal(error: Exception) -> Refusal | None:
    """What of the request a model's error is about, where its words say so; None for any other error."""
    if not isinstance(error, ServerError) or error.code is not ErrorCode.INVALID_ARGUMENT:
        return None
    if isinstance(error, ParameterError | MediaTypeError | UnknownToolFormatError):
        return None
    text = error.message
    match = _PARAMETER.match(text)
    if match is not None:
        name = match["name"] or match["message"]
        return Refusal(Subject.PROMPT, text) if name in _PROMPT_INPUTS else Refusal(Subject.PARAMETER, text, name)
    if text.startswith(_TEMPLATE):
        return Refusal(Subject.PROMPT, text)
    if text.startswith(_STRUCTURE):
        return Refusal(Subject.STRUCTURE, text)
    match = _PROMPT.match(text)
    if match is None:
        return None
    sizes = _TOO_LONG.search(text) if match["too_long"] else None
    return Refusal(
        Subject.PROMPT,
        text,
        is_too_long=bool(match["too_long"]),
        sizes=None if sizes is None else (int(sizes[1]), int(sizes[2])),
    )


class ApiErrors(ErrorWriter):
    """The form of an API's errors, also within an answer that has begun."""

    @abc.abstractmethod
    def document(self, error: Exception) -> dict[str, Any]:
        """The error as a document. What is not a ServerError is a fault of ours, and logged."""

    @abc.abstractmethod
    def placed(self, error: Exception, document: Mapping[str, Any]) -> Exception:
        """A model's refusal as an error that names what of the request's `document` is wrong; any other as it is."""


class UsualErrors(ApiErrors):
    """Errors of an API whose documents follow from a status, a text and perhaps a code."""

    # The API, as the log has it.
    api: ClassVar[str]
    # Of a server that has too much to do: clients get a time to try again.
    overload_status: ClassVar[int] = 429

    @abc.abstractmethod
    def form(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """The document of an error; `code` is for machines, if the API has such codes."""

    @abc.abstractmethod
    def worded(self, error: ServerError) -> tuple[int, dict[str, Any]]:
        """The status and the document of an error."""

    def describe(self, error: Exception) -> tuple[int, dict[str, Any]]:
        """As `worded`, of any error. What is not a ServerError is logged: called once, at the edge of a request."""
        if isinstance(error, ServerError):
            return self.worded(error)
        logger.error("a request of %s failed unexpectedly", self.api, exc_info=error)
        return 500, self.form(500, f"internal error ({type(error).__name__}); the server's log has the details")

    def document(self, error: Exception) -> dict[str, Any]:
        return self.describe(error)[1]

    def failed(self, error: Exception) -> HttpResponse:
        status, document = self.describe(error)
        headers = [JSON_TYPE]
        if isinstance(error, ServerError):
            headers += retry_headers(error, is_overload=status == self.overload_status)
        return HttpResponse(status, headers, (orjson.dumps(document),))

    def refused(self, status: int, message: str, code: str | None = None) -> HttpResponse:
        return json_response(self.form(status, message, code), status)
