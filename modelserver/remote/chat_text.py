"""Language models behind other APIs: what our tensors ask for, and the text, calls of tools and counts of an answer."""

from __future__ import annotations

import abc
import enum
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from modelserver.backend import (
    Datatype,
    ErrorCode,
    InferRequest,
    InferResponse,
    InvalidArgumentError,
    ModelConfig,
    ModelInput,
    ModelOutput,
    ModelTransactionPolicy,
    Tensor,
)
from modelserver.client.call_error import CallError
from modelserver.client.http_pool import HttpPool
from modelserver.endpoints.endpoint import EndpointState, Outcome
from modelserver.remote.v2 import Described, Sent, Transport, state_of, unreadable

# How calls of tools and reasoning are written into the text, for the readers of these names to find them there.
TRAITS = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
_INPUTS = {
    "text_input": Datatype.BYTES,
    "messages": Datatype.BYTES,
    "stream": Datatype.BOOL,
    "sampling_parameters": Datatype.BYTES,
    "exclude_input_in_output": Datatype.BOOL,
    "return_finish_reason": Datatype.BOOL,
    "return_num_input_tokens": Datatype.BOOL,
    "return_num_output_tokens": Datatype.BOOL,
    "return_num_cached_tokens": Datatype.BOOL,
}
_OUTPUTS = {
    "text_output": Datatype.BYTES,
    "finish_reason": Datatype.BYTES,
    "index": Datatype.INT32,
    "num_input_tokens": Datatype.UINT32,
    "num_output_tokens": Datatype.UINT32,
    "num_cached_tokens": Datatype.UINT32,
}


def completed(config: ModelConfig) -> dict[str, Any]:
    """The fields of a language model's config that are not written."""
    return {
        "input": config.input
        or tuple(ModelInput(name, kind, dims=(1,), optional=True) for name, kind in _INPUTS.items()),
        "output": config.output or tuple(ModelOutput(name, kind, dims=(-1,)) for name, kind in _OUTPUTS.items()),
        "parameters": {**TRAITS, **config.parameters},
        "model_transaction_policy": ModelTransactionPolicy(decoupled=True),
    }


class CallForm(enum.Enum):
    """How the reader of the text expects calls of tools."""

    MARKED = enum.auto()  # between marks, wherever the model makes them
    LISTED = enum.auto()  # an array of them and nothing else, because one is required
    ARGUMENTS = enum.auto()  # the arguments of one function, whose name is known


@dataclass(slots=True)
class Ask:
    """What a request asks for. There is a `prompt` if there is no conversation."""

    prompt: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    structure: dict[str, Any] | None = None
    is_streamed: bool = False
    form: CallForm = CallForm.MARKED
    function: str = ""


def read_ask(request: InferRequest) -> Ask:
    """Raises InvalidArgumentError for inputs that are not what a language model takes."""
    texts = {name: _text(tensor) for name, tensor in request.inputs.items() if tensor.datatype is Datatype.BYTES}
    ask = Ask(prompt=texts.get("text_input", ""))
    stream = request.inputs.get("stream")
    ask.is_streamed = stream is not None and bool(stream.data.any())
    try:
        conversation = orjson.loads(texts["messages"]) if texts.get("messages") else []
        sampling = orjson.loads(texts["sampling_parameters"]) if texts.get("sampling_parameters") else {}
        if isinstance(conversation, dict):
            ask.tools = list(conversation.get("tools") or ())
            conversation = conversation["messages"]
        ask.messages = [dict(message) for message in conversation]
        ask.sampling = {name: value for name, value in dict(sampling).items() if value is not None}
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidArgumentError(f"messages or sampling_parameters cannot be read: {error}") from None
    ask.structure = ask.sampling.pop("structured_outputs", None)
    _find_forced_call(ask)
    return ask


def _text(tensor: Tensor) -> str:
    first = tensor.data.flat[0] if tensor.data.size else b""
    return first.decode("utf-8", "replace") if isinstance(first, bytes) else str(first)


def _find_forced_call(ask: Ask) -> None:
    """Tell a constraint that makes the model call tools from one that the client has written."""
    schema = (ask.structure or {}).get("json")
    if not isinstance(schema, dict) or not ask.tools:
        return
    items = schema.get("items")
    calls = items.get("anyOf", [items]) if schema.get("type") == "array" and isinstance(items, dict) else []
    names = [call.get("properties", {}).get("name", {}).get("enum") for call in calls if isinstance(call, dict)]
    functions = [tool.get("function", {}) for tool in ask.tools]
    if names and names == [[function.get("name")] for function in functions]:
        ask.form, ask.structure = CallForm.LISTED, None
        return
    for function in functions:
        if schema in (function.get("parameters"), {"type": "object", **(function.get("parameters") or {})}):
            ask.form, ask.function, ask.structure = CallForm.ARGUMENTS, str(function.get("name")), None
            return


class ChoiceText:
    """The text of one choice, with reasoning and calls of tools where their readers look for them."""

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._is_reasoning = False
        self._num_calls = 0
        self._has_arguments = True

    def say(self, text: str) -> str:
        return self._end_reasoning() + text if text else ""

    def reason(self, text: str) -> str:
        if not text or self._form is not CallForm.MARKED:
            return ""
        begin, self._is_reasoning = "" if self._is_reasoning else "<think>", True
        return begin + text

    def call(self, name: str) -> str:
        """A call of this function begins."""
        text = self._end_reasoning() + self._end_call(has_next=True)
        self._num_calls += 1
        self._has_arguments = False
        quoted = orjson.dumps(name).decode()
        match self._form:
            case CallForm.MARKED:
                return f'{text}<tool_call>\n{{"name": {quoted}, "arguments": '
            case CallForm.LISTED:
                return f'{text}{{"name": {quoted}, "parameters": '
            case CallForm.ARGUMENTS:
                return text

    def argue(self, arguments: str) -> str:
        """More of the arguments of the call."""
        self._has_arguments = self._has_arguments or bool(arguments)
        return arguments

    def end(self) -> str:
        return self._end_reasoning() + self._end_call(has_next=False)

    def _end_reasoning(self) -> str:
        was_reasoning, self._is_reasoning = self._is_reasoning, False
        return "</think>" if was_reasoning else ""

    def _end_call(self, *, has_next: bool) -> str:
        arguments, self._has_arguments = "" if self._has_arguments else "{}", True
        match self._form:
            case CallForm.MARKED:
                return f"{arguments}}}\n</tool_call>\n" if self._num_calls else ""
            case CallForm.LISTED if not self._num_calls:
                return "[" if has_next else ""
            case CallForm.LISTED:
                return arguments + ("}," if has_next else "}]")
            case _:
                return arguments


@dataclass(slots=True)
class Usage:
    """Tokens of a request; None: not told."""

    num_input: int | None = None
    num_output: int | None = None
    num_cached: int | None = None


class AnswerText:
    """Makes responses of an answer's pieces: one for each piece, or one for all."""

    def __init__(self, ask: Ask) -> None:
        self.usage = Usage()
        self.finish_reasons: dict[int, str] = {}
        self._ask = ask
        self._choices: dict[int, ChoiceText] = {}
        self._whole: dict[int, list[str]] = {}

    def choice(self, index: int) -> ChoiceText:
        return self._choices.setdefault(index, ChoiceText(self._ask.form))

    def piece(self, index: int, text: str) -> InferResponse | None:
        """The response for more text of a choice; None if there is none yet."""
        if not text:
            return None
        if self._ask.is_streamed:
            return self._response({index: text}, {}, None)
        self._whole.setdefault(index, []).append(text)
        return None

    def end(self) -> InferResponse:
        """The last response. Raises CallError for an answer without an end."""
        if not self.finish_reasons:
            raise CallError("the answer ended before its end", outcome=Outcome.LOST)
        texts = {
            index: "".join(self._whole.get(index, ())) + self.choice(index).end()
            for index in sorted(self.finish_reasons)
        }
        return self._response(texts, self.finish_reasons, self.usage)

    def _response(self, texts: Mapping[int, str], reasons: Mapping[int, str], usage: Usage | None) -> InferResponse:
        columns: dict[str, list[Any]] = {
            "text_output": [text.encode() for text in texts.values()],
            "finish_reason": [reasons.get(index, "None").encode() for index in texts],
            "index": list(texts),
        }
        if usage is not None and usage.num_input is not None:
            columns["num_input_tokens"] = [usage.num_input]
        if usage is not None and usage.num_cached is not None:
            columns["num_cached_tokens"] = [usage.num_cached]
        if usage is not None and usage.num_output is not None:
            # The endpoint counts all choices together.
            columns["num_output_tokens"] = [usage.num_output, *[0] * (len(texts) - 1)]
        outputs = [
            Tensor(name, _OUTPUTS[name], np.array(values, object if name in _TEXTS else _OUTPUTS[name].numpy))
            for name, values in columns.items()
        ]
        return InferResponse(outputs=outputs, is_final=False)


_TEXTS = frozenset({"text_output", "finish_reason"})


class ChatTransport(Transport, abc.ABC):
    """One endpoint of a language model, asked for streams of events over HTTP."""

    def __init__(self, pool: HttpPool, model: str, base: str) -> None:
        self._pool = pool
        self._model = model
        self._base = base

    @abc.abstractmethod
    def _question(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        """The path and the document. Raises InvalidArgumentError for what the API does not have."""

    @abc.abstractmethod
    def _take(self, document: dict[str, Any], answer: AnswerText) -> list[tuple[int, str]]:
        """The text of an event by choice; what else it tells goes to `answer`. Raises CallError for an error."""

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        return dict(headers)

    async def infer(self, request: InferRequest, sent: Sent) -> InferResponse:
        del request, sent
        raise CallError("a language model answers in streams", code=ErrorCode.INTERNAL, outcome=Outcome.CLIENT_ERROR)

    async def stream(self, request: InferRequest, sent: Sent) -> AsyncGenerator[InferResponse, None]:
        ask = read_ask(request)
        path, document = self._question(ask)
        headers = {"content-type": "application/json", "accept": "text/event-stream", **self._headers(sent.headers)}
        answer = AnswerText(ask)
        call = await self._pool.open("POST", self._base + path, headers, [orjson.dumps(document)])
        try:
            await call.wait_for_head()
            async with aclosing(call.lines()) as lines:
                async for line in lines:
                    data = line[5:].strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        break
                    for index, text in self._read(data, answer) if data else ():
                        response = answer.piece(index, text)
                        if response is not None:
                            yield response
            yield answer.end()
        finally:
            call.close()

    def _read(self, data: bytes, answer: AnswerText) -> list[tuple[int, str]]:
        try:
            document = orjson.loads(data)
            if document.get("error"):
                error = document["error"]
                text = error.get("message", error) if isinstance(error, dict) else error
                raise CallError(f"the answer broke off: {text}", code=ErrorCode.INTERNAL, outcome=Outcome.SERVER_ERROR)
            return self._take(document, answer)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise unreadable(error) from None

    async def probe(self, headers: Mapping[str, str]) -> EndpointState:
        try:
            await self._pool.ask("GET", f"{self._base}{self._models_path}", self._headers(headers))
        except CallError as error:
            return state_of(error)
        return EndpointState.READY

    _models_path = "/models"

    async def describe(self, headers: Mapping[str, str]) -> Described:
        del headers
        return Described(None, {})

    def lose(self, reason: str) -> None:
        self._pool.lose(reason)
