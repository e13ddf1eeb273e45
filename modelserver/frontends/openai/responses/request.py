"""The body of `POST /v1/responses`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelserver.core.long_work import Slices
from modelserver.frontends.llm.call import GenerateCall
from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import MAX_INT64, Fields, Range
from modelserver.frontends.openai.limits import MAX_LOGPROBS
from modelserver.frontends.openai.responses.items import ITEMS_OF_SLICE, MAX_ITEMS, Messages
from modelserver.frontends.openai.responses.tools import ResponseTools, read_tools
from modelserver.frontends.openai.sampling import VERBOSITIES, read_sampling, unsupported
from modelserver.frontends.openai.structure import check_schema

Document = dict[str, Any]

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
_OBJECTS_WITHOUT_EFFECT = ("stream_options", "access_programs", "background_options", "image")
_MAX_METADATA, _MAX_NAME_LEN, _MAX_VALUE_LEN = 16, 64, 512
_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """What the model is asked. `items` are the input's own, without those of earlier responses.

    `echoed` are the members of the request that its answer repeats.
    """

    call: GenerateCall
    tools: ResponseTools
    items: list[Document]
    is_stored: bool
    echoed: Document
    is_background: bool = False
    conversation_id: str | None = None


def read_items(fields: Fields) -> list[Document]:
    """`input` as items. Raises ParameterError."""
    fields.need("input", "a string or an array of items")
    value = fields.document["input"]
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    return [dict(item.document) for item in fields.objects("input", MAX_ITEMS) or ()]


def request_slices(fields: Fields, earlier: list[Document]) -> Slices[ResponseRequest]:
    """`earlier` are the items of the responses before this one. Raises ParameterError for what is wrong."""
    is_stored, is_background = fields.flag("store", True), fields.flag("background")
    if is_background and not is_stored:
        raise ParameterError("'background' needs 'store': what is made in the background is kept", "background")
    if fields.has("prompt"):
        raise unsupported(fields, "prompt", "send the items with the request, or use previous_response_id")
    fields.integer("max_tool_calls", Range(1, MAX_INT64))
    fields.word("truncation", ("auto", "disabled"))
    fields.items("context_management", MAX_ITEMS)
    for name in _OBJECTS_WITHOUT_EFFECT:
        fields.mapping(name)
    items = read_items(fields)
    tools = read_tools(fields)
    sampling = read_sampling(fields)
    sampling["max_tokens"] = fields.integer("max_output_tokens", Range(1, MAX_INT64))
    _read_logprobs(fields, sampling)
    structure = tools.tools.structure() or _read_format(fields)
    if structure is not None:
        sampling["structured_outputs"] = structure
    call = GenerateCall(
        conversation=(yield from conversation_slices(fields, [*earlier, *items], tools)),
        sampling={name: value for name, value in sampling.items() if value is not None},
        tools=tools.tools,
        is_streamed=fields.flag("stream"),
    )
    return ResponseRequest(call, tools, items, is_stored, _echoed(fields), is_background, read_conversation_id(fields))


def read_conversation_id(fields: Fields) -> str | None:
    """The conversation that the response is a turn of. Raises ParameterError."""
    value = fields.document.get("conversation")
    if value is None:
        return None
    if fields.has("previous_response_id"):
        raise ParameterError("'conversation' and 'previous_response_id' exclude each other", "conversation")
    if isinstance(value, str):
        return value
    named = fields.fields("conversation")
    assert named is not None, "it is there"
    named.need("id", "the id of a conversation")
    return named.text("id")


def read_metadata(fields: Fields) -> dict[str, str] | None:
    """At most 16 texts of 512 characters, by names of 64; None without it. Raises ParameterError."""
    metadata = fields.mapping("metadata")
    if metadata is None:
        return None
    if len(metadata) > _MAX_METADATA:
        raise ParameterError(f"'metadata' has {len(metadata)} members, at most {_MAX_METADATA} are allowed", "metadata")
    for name, value in metadata.items():
        if len(name) > _MAX_NAME_LEN or not isinstance(value, str) or len(value) > _MAX_VALUE_LEN:
            raise fields.wrong(
                f"metadata.{name:.64}",
                f"a string of up to {_MAX_VALUE_LEN} letters, by a name of {_MAX_NAME_LEN}",
                value,
            )
    return metadata


def conversation_slices(fields: Fields, items: list[Document], tools: ResponseTools) -> Slices[Document]:
    """What chat templates take. Raises ParameterError."""
    messages = Messages(fields.text("instructions"))
    for number, item in enumerate(items):
        if number % ITEMS_OF_SLICE == 0:
            yield
        messages.add(Fields(item, f"input[{number}]"))
    found = messages.finish()
    if not found:
        raise fields.wrong("input", "a string or an array with a message", fields.document["input"])
    conversation: Document = {
        "messages": found,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    if tools.tools.tools:
        conversation["tools"] = list(tools.tools.tools)
    kwargs: Document = {}
    reasoning, text = fields.fields("reasoning"), fields.fields("text")
    effort = None if reasoning is None else reasoning.word("effort", _EFFORTS)
    verbosity = None if text is None else text.word("verbosity", VERBOSITIES)
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    if verbosity is not None:
        kwargs["verbosity"] = verbosity
    if kwargs:
        conversation["chat_template_kwargs"] = kwargs
    return conversation


def _read_logprobs(fields: Fields, sampling: Document) -> None:
    num_top = fields.integer("top_logprobs", Range(0, MAX_LOGPROBS))
    if num_top or _LOGPROBS in (fields.texts("include", 32) or ()):
        sampling["logprobs"] = num_top or 0


def _read_format(fields: Fields) -> Document | None:
    text = fields.fields("text")
    form = None if text is None else text.fields("format")
    if form is None:
        return None
    form.need("type", "text, json_object or json_schema")
    kind = form.word("type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    form.need("schema", "a JSON schema")
    check_schema(form, "schema", form.document["schema"])
    return {"json": form.document["schema"]}


def _echoed(fields: Fields) -> Document:
    """With OpenAI's defaults for what the request leaves out."""
    defaults: Document = {
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "user": None,
    }
    given = {name: fields.document[name] for name in defaults if fields.has(name)}
    return {**defaults, **given, "metadata": read_metadata(fields) or {}}
