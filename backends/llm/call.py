"""Reads a request's tensors and parameters: `InferRequest` -> `Call`. Nothing here knows a model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import orjson

from modelserver.backend import (
    Array,
    InferRequest,
    InferResponse,
    InvalidArgumentError,
    parse_long_json,
)

from .contract import COMPANIONS, OUTPUTS, PREDICTED, PREDICTION, RETURNS, Operation
from .json_fields import integer, quote, string
from .lora.uses import ADAPTER_PARAMETERS, AdapterUse, read_uses
from .sampling_params import CONVERTERS, SamplingParams
from .structured_outputs import ALIASES

if TYPE_CHECKING:
    from .pictures.prompt import PromptPictures

# TensorRT-LLM's name of `stop`. Its public examples send these two with an empty text, which means none.
_STOP_WORDS, _BAD_WORDS = "stop_words", "bad_words"
_KNOWN_PARAMETERS = CONVERTERS.keys() | ALIASES | {_STOP_WORDS}
_MAX_INT32 = 2**31 - 1
# A longer text stays bytes until the tokenizer reads it in pieces: making one string of it would stop all threads.
_MAX_DECODED_BYTES = 1 << 20
# JSON that is parsed in one call, which stops all threads; and the bounds of longer JSON, as for calls of OpenAI's API.
_MAX_PARSED_BYTES = 16 * 1024
_MAX_JSON_DEPTH = 100
_MAX_JSON_VALUES = 1 << 19
# Operations whose texts may be cut.
_CUTTING = (Operation.EMBED, Operation.TOKEN_EMBED, Operation.CLASSIFY)
_PROMPTLESS = (Operation.LOAD_ADAPTER, Operation.SLOTS)
# Operations other than `generate` that adapters have an effect on.
_ADAPTED = (Operation.EMBED, Operation.LOAD_ADAPTER)
_CHAT_FIELDS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation for the chat template, checked as far as can be without it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    has_generation_prompt: bool
    is_continued: bool
    variables: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One of `text`, `chat` and `token_ids` is there. `wants` are the outputs that were asked for.

    A long `text` or `prediction` is UTF-8, and was not checked.

    `has_special_tokens` None: as usual for what was given. `dimensions` is of embeddings, `truncation` of texts that
    are embedded or classified; `pair_truncation` is the number of tokens of the `pair` that are read.
    """

    operation: Operation
    text: str | bytes | None
    chat: Chat | None
    token_ids: Array | None  # of any length: the lists that models take are made of those that fit
    is_streamed: bool
    has_input: bool  # the prompt stands before the output
    wants: frozenset[str]
    params: SamplingParams
    priority: int
    cache_salt: str
    has_special_tokens: bool | None
    dimensions: int | None
    truncation: int | None
    images: tuple[bytes, ...] = ()  # files, base64 or data: URLs, in the order of their places in the prompt
    has_logprobs: bool = False  # the sampling parameters ask for log-probabilities
    pair: str | None = None  # the text that is scored beside `text`
    pair_truncation: int | None = None
    is_raw: bool = False  # scores are the network's own numbers
    adapters: tuple[AdapterUse, ...] = ()
    prediction: str | bytes | None = None  # the answer that is expected

    def longest(self, max_model_len: int) -> int | None:
        """How many tokens of the text are read; None: it may not be cut. InvalidArgumentError for what is none."""
        if self.truncation is None:
            return None
        if self.truncation != -1 and not 1 <= self.truncation <= max_model_len:
            raise InvalidArgumentError(
                f"input 'truncate_prompt_tokens': expected -1 (as many as the model takes), or 1 to {max_model_len}, "
                f"got {self.truncation}"
            )
        return max_model_len if self.truncation == -1 else self.truncation


def read_call(
    request: InferRequest, *, usual: Operation = Operation.GENERATE, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Call:
    """`usual` is the operation of requests that name none, `defaults` sampling parameters that they do not set.

    Raises InvalidArgumentError, which names the input or parameter, for what is wrong whatever the model.
    """
    operation = _operation(request, usual)
    text, chat, token_ids = (None, None, None) if operation in _PROMPTLESS else _prompt(request, operation)
    is_streamed = _flag(request, "stream") or False
    wants = {output for name, output in RETURNS.items() if _flag(request, name)}
    wants |= OUTPUTS.keys() & set(request.outputs or ())
    wants |= {companion for output, companion in COMPANIONS.items() if output in wants}
    if PREDICTION in request.inputs:
        if operation is not Operation.GENERATE:
            raise InvalidArgumentError(f"input '{PREDICTION}' goes with the operation 'generate' only")
        wants.update(PREDICTED)
    excludes_input = _flag(request, "exclude_input_in_output")
    if excludes_input is False and is_streamed:
        raise InvalidArgumentError(
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
        )
    has_input = not is_streamed and text is not None if excludes_input is None else not excludes_input
    adapters: tuple[AdapterUse, ...] = ()
    if operation is not Operation.GENERATE:
        if is_streamed:
            raise InvalidArgumentError(f"input 'stream' cannot be true with the operation '{operation.value}'")
        params, priority, cache_salt, has_logprobs = SamplingParams(), 0, "", False
        if operation in _ADAPTED:
            adapters = read_uses(dict(request.parameters), request.adapters)
    else:
        params, priority, cache_salt, has_logprobs, adapters = _sampling(request, wants, defaults)
    truncation = _number(request, "truncate_prompt_tokens")
    if truncation is not None and operation not in _CUTTING:
        raise InvalidArgumentError(
            f"input 'truncate_prompt_tokens' does not go with '{operation.value}', only with "
            f"{' and '.join(each.value for each in _CUTTING)}"
        )
    pair_truncation = _number(request, "truncate_pair_tokens")
    if pair_truncation is not None and pair_truncation < 1:
        raise InvalidArgumentError(f"input 'truncate_pair_tokens': expected 1 or more, got {pair_truncation}")
    pair = _text(request, "text_pair")
    if pair is not None and (text is None or operation is not Operation.CLASSIFY):
        raise InvalidArgumentError("input 'text_pair' goes with the input 'text_input' and the operation 'classify'")
    return Call(
        operation,
        text,
        chat,
        token_ids,
        is_streamed,
        has_input,
        frozenset(wants),
        params,
        priority,
        cache_salt,
        _flag(request, "add_special_tokens"),
        _number(request, "dimensions"),
        truncation,
        _images(request, operation),
        has_logprobs,
        pair,
        pair_truncation,
        _flag(request, "raw_scores") or False,
        adapters,
        _long_text(request, PREDICTION),
    )


def _operation(request: InferRequest, usual: Operation) -> Operation:
    name = _text(request, "operation")
    if name is None:
        return usual
    try:
        return Operation(name)
    except ValueError:
        known = ", ".join(operation.value for operation in Operation)
        raise InvalidArgumentError(f"input 'operation': expected one of {known}, got {quote(name)}") from None


def _prompt(request: InferRequest, operation: Operation) -> tuple[str | bytes | None, Chat | None, Array | None]:
    given = [name for name in ("text_input", "messages", "input_ids") if name in request.inputs]
    takes: tuple[str, ...] = ("text_input", "messages", "input_ids")
    if operation is Operation.DETOKENIZE:
        takes = ("input_ids",)
    elif operation is Operation.TOKENIZE:
        takes = ("text_input", "messages")
    if len(given) != 1 or given[0] not in takes:
        expected = f"the input '{takes[0]}'" if len(takes) == 1 else f"one of the inputs {', '.join(takes)}"
        got = f"{' and '.join(given)}" if given else "none of them"
        raise InvalidArgumentError(f"the operation '{operation.value}' needs {expected}, got {got}")
    if given[0] == "input_ids":
        return None, None, request.inputs["input_ids"].data.ravel()
    if given[0] == "text_input":
        return _long_text(request, "text_input"), None, None
    return None, _chat(request), None


def _images(request: InferRequest, operation: Operation) -> tuple[bytes, ...]:
    tensor = request.inputs.get("image")
    if tensor is None:
        return ()
    if operation not in (Operation.GENERATE, Operation.TOKENIZE) or "input_ids" in request.inputs:
        raise InvalidArgumentError("input 'image' goes with text_input or messages, of generate or tokenize")
    elements = tensor.data.ravel().tolist()
    return tuple(each.encode(errors="replace") if isinstance(each, str) else each for each in elements)


def _chat(request: InferRequest) -> Chat:
    document = _object(request, "messages")
    unknown = document.keys() - _CHAT_FIELDS
    if unknown:
        raise InvalidArgumentError(
            f"input 'messages': unknown key {quote(min(unknown))}; there are {', '.join(sorted(_CHAT_FIELDS))}"
        )
    messages = _objects(document, "messages")
    if not messages:
        raise InvalidArgumentError("input 'messages': expected at least one message, got an empty list")
    variables = document.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise InvalidArgumentError(
            f"input 'messages': 'chat_template_kwargs' must be an object, got {quote(variables)}"
        )
    return Chat(
        messages,
        _objects(document, "tools"),
        _objects(document, "documents"),
        _chat_flag(document, "add_generation_prompt", default=True),
        _chat_flag(document, "continue_final_message", default=False),
        variables,
    )


def _objects(document: Mapping[str, Any], key: str) -> list[dict[str, Any]] | None:
    value = document.get(key)
    if value is None and key != "messages":
        return None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidArgumentError(f"input 'messages': '{key}' must be a list of objects, got {quote(value)}")
    return value


def _chat_flag(document: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = document.get(key, default)
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"input 'messages': '{key}' must be true or false, got {quote(value)}")
    return value


def _sampling(
    request: InferRequest, wants: set[str], defaults: Mapping[str, Any]
) -> tuple[SamplingParams, int, str, bool, tuple[AdapterUse, ...]]:
    """Sampling parameters, priority, cache salt, and whether the parameters ask for log-probabilities, which are
    computed only where an output wants them; and adapters."""
    values = {name: value for name, value in request.parameters.items() if _is_parameter(name)}
    values = {name: value for name, value in values.items() if value != "" or name not in (_STOP_WORDS, _BAD_WORDS)}
    if _STOP_WORDS in values:
        values.setdefault("stop", values.pop(_STOP_WORDS))
    if "sampling_parameters" in request.inputs:
        values |= _object(request, "sampling_parameters")
    values = _with_defaults(values, defaults)
    adapters = read_uses(values, request.adapters)
    priority = integer("priority", values.pop("priority", request.priority))
    if abs(priority) > _MAX_INT32:
        raise InvalidArgumentError(f"parameter 'priority' must be an integer of 32 bits, got {priority}")
    cache_salt = string("cache_salt", values.pop("cache_salt", None) or "")
    params = SamplingParams.from_json(values)
    has_logprobs = params.logprobs is not None
    computes_logprobs = not wants.isdisjoint(("token_logprobs", "cumulative_logprob"))
    computes_logprobs |= has_logprobs and "logprobs" in wants
    logprobs = (params.logprobs or 0) if computes_logprobs else None
    prompt_logprobs = (params.prompt_logprobs or 0) if "prompt_logprobs" in wants else None
    if (logprobs, prompt_logprobs) != (params.logprobs, params.prompt_logprobs):
        params = replace(params, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    return params, priority, cache_salt, has_logprobs, adapters


def _with_defaults(values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """null is as good as absent here: it asks for no bound of the length of its own."""
    missing = {name: value for name, value in defaults.items() if values.get(name) is None}
    return {**values, **missing} if missing else values


def _is_parameter(name: str) -> bool:
    """Whether a request parameter is the model's. Others may be anybody's, but not those that were nearly right."""
    if name in _KNOWN_PARAMETERS or name in ("cache_salt", *ADAPTER_PARAMETERS):
        return True
    near = difflib.get_close_matches(name[:100], _KNOWN_PARAMETERS, n=1, cutoff=0.85)
    if near:
        raise InvalidArgumentError(f"unknown parameter '{name[:100]}'; did you mean '{near[0]}'?")
    return False


def _flag(request: InferRequest, name: str) -> bool | None:
    tensor = request.inputs.get(name)
    return None if tensor is None else bool(tensor.data.item())


def _number(request: InferRequest, name: str) -> int | None:
    tensor = request.inputs.get(name)
    return None if tensor is None else int(tensor.data.item())


def _text(request: InferRequest, name: str) -> str | None:
    tensor = request.inputs.get(name)
    if tensor is None:
        return None
    element = tensor.data.item()
    if isinstance(element, str):
        return element
    try:
        return str(element, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"input '{name}' is not UTF-8: {error}") from None


def _long_text(request: InferRequest, name: str) -> str | bytes | None:
    """The same, but for a text that is too long to be decoded at once."""
    tensor = request.inputs.get(name)
    element = None if tensor is None else tensor.data.item()
    is_long = isinstance(element, bytes) and len(element) > _MAX_DECODED_BYTES
    return element if is_long else _text(request, name)


def _object(request: InferRequest, name: str) -> dict[str, Any]:
    """A JSON object in an input; empty text is an empty one."""
    tensor = request.inputs.get(name)
    element = b"" if tensor is None else tensor.data.item()
    text = element.encode(errors="replace") if isinstance(element, str) else element
    try:
        if len(text) > _MAX_PARSED_BYTES:
            value = parse_long_json(text, max_depth=_MAX_JSON_DEPTH, max_values=_MAX_JSON_VALUES)
        else:
            value = orjson.loads(text) if text else {}
    except (orjson.JSONDecodeError, InvalidArgumentError) as error:
        shown = quote(text[:200].decode(errors="replace"))
        raise InvalidArgumentError(f"input '{name}' must be a JSON object, got {shown}: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(f"input '{name}' must be a JSON object, got {quote(value)}")
    return value


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """As a model takes it on, or with its answer, where reading is all that was asked for.

    `text` is the source of `token_ids`; None if tokens were given, or if the text is not needed. `type_ids` say which
    token belongs to which text of a pair. `prediction` are the tokens of the expected answer.
    """

    call: Call
    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    response: InferResponse | None = None
    pictures: PromptPictures | None = None
    type_ids: list[int] | None = None
    prediction: Sequence[int] = ()
