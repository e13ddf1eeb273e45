"""The body of `POST /v1/chat/completions`, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from modelserver.frontends.llm.call import GenerateCall
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import MAX_INT64, Fields, Range
from modelserver.frontends.llm.tools import Tools, ToolUse
from modelserver.frontends.openai.answer_parts import AnswerOptions, read_stream_options
from modelserver.frontends.openai.limits import MAX_LOGPROBS, MAX_TOOLS
from modelserver.frontends.openai.messages import read_messages, read_text
from modelserver.frontends.openai.sampling import VERBOSITIES, read_choices, read_sampling, unsupported
from modelserver.frontends.openai.structure import check_schema, read_structure

# Of a template's own arguments; the others are for the client to choose.
_RESERVED_KWARGS = frozenset(
    {
        "self",
        "chat_template",
        "conversation",
        "messages",
        "tools",
        "documents",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
    }
)
_MAX_DOCUMENTS = 1024
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What the model is asked, and how the answer is written. `tools` are those of the call."""

    call: GenerateCall
    options: AnswerOptions
    tools: Tools


def read_chat(fields: Fields) -> ChatRequest:
    """Raises ParameterError for the first thing that is wrong."""
    tools = read_tools(fields)
    conversation = read_conversation(fields, tools)
    modalities = fields.texts("modalities", 8)
    if modalities and modalities != ["text"]:
        raise unsupported(fields, "modalities", "answers are text")
    is_streamed, has_usage, is_continuous = read_stream_options(fields)
    sampling = read_sampling(fields)
    num_choices = read_choices(fields)
    if num_choices > 1:
        sampling["n"] = num_choices
    sampling["max_tokens"] = _read_max_tokens(fields)
    _read_logprobs(fields, sampling, is_streamed=is_streamed)
    structure = _read_structure(fields, tools)
    if structure is not None:
        sampling["structured_outputs"] = structure
    last = conversation["messages"][-1]
    return ChatRequest(
        call=GenerateCall(
            conversation=conversation,
            sampling=sampling,
            num_choices=num_choices,
            prediction=_read_prediction(fields),
            tools=tools,
            echo=last["content"] if fields.flag("echo") and last["role"] == "assistant" else "",
            is_streamed=is_streamed,
            has_reasoning=fields.flag("include_reasoning", True),
            has_token_ids=fields.flag("return_token_ids"),
            is_counted=has_usage or not is_streamed,
            adds_special_tokens=fields.flag("add_special_tokens") if fields.has("add_special_tokens") else None,
        ),
        options=AnswerOptions(
            num_returned=num_choices,
            has_usage=has_usage,
            has_continuous_usage=is_continuous,
            names_tokens_by_id=fields.flag("return_tokens_as_token_ids"),
        ),
        tools=tools,
    )


def read_conversation(fields: Fields, tools: Tools | None = None) -> dict[str, Any]:
    """What a model makes its prompt of: messages, tools, documents and the template's arguments.

    Raises ParameterError, also for a template: those come with models, and never with requests.
    """
    if fields.has("chat_template"):
        raise unsupported(fields, "chat_template", "templates come with the model, not with requests")
    conversation: dict[str, Any] = {"messages": read_messages(fields)}
    if tools is None:
        tools = read_tools(fields)
    if tools.tools:
        conversation["tools"] = list(tools.tools)
    documents = fields.objects("documents", _MAX_DOCUMENTS)
    if documents:
        conversation["documents"] = [document.document for document in documents]
    begins = fields.flag("add_generation_prompt", True)
    continues = fields.flag("continue_final_message")
    if continues and begins and fields.has("add_generation_prompt"):
        raise ParameterError(
            "'continue_final_message' needs add_generation_prompt: false", "continue_final_message", Fault.INVALID_VALUE
        )
    conversation["add_generation_prompt"] = begins and not continues
    conversation["continue_final_message"] = continues
    kwargs = _read_kwargs(fields)
    if kwargs:
        conversation["chat_template_kwargs"] = kwargs
    return conversation


def _read_kwargs(fields: Fields) -> dict[str, Any]:
    kwargs = dict(fields.mapping("chat_template_kwargs") or {})
    for name in kwargs:
        if name in _RESERVED_KWARGS:
            raise ParameterError(
                f"'chat_template_kwargs.{name}' is not allowed: it has a place of its own",
                f"chat_template_kwargs.{name}",
            )
    effort = fields.word("reasoning_effort", _EFFORTS)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            kwargs.setdefault("enable_thinking", False)
    verbosity = fields.word("verbosity", VERBOSITIES)
    if verbosity is not None:
        kwargs.setdefault("verbosity", verbosity)
    return kwargs


def _read_prediction(fields: Fields) -> str:
    """The text that is expected as the answer; empty if none is."""
    prediction = fields.fields("prediction")
    if prediction is None:
        return ""
    prediction.need("type", "content")
    prediction.word("type", ("content",))
    prediction.need("content", "a string or an array of parts")
    return read_text(prediction, "content") or ""


def _read_max_tokens(fields: Fields) -> int | None:
    """None: as many as fit. `max_tokens` is the older name and gives way."""
    bounds = Range(1, MAX_INT64)
    older = fields.integer("max_tokens", bounds)
    newer = fields.integer("max_completion_tokens", bounds)
    return older if newer is None else newer


def _read_logprobs(fields: Fields, sampling: dict[str, Any], *, is_streamed: bool) -> None:
    is_wanted = fields.flag("logprobs")
    num_top = fields.integer("top_logprobs", Range(0, MAX_LOGPROBS))
    if num_top and not is_wanted:
        raise ParameterError("'top_logprobs' needs logprobs: true", "top_logprobs")
    if is_wanted:
        sampling["logprobs"] = num_top or 0
    prompt_logprobs = fields.integer("prompt_logprobs", Range(0, MAX_LOGPROBS))
    if prompt_logprobs is not None:
        if is_streamed:
            raise ParameterError("'prompt_logprobs' cannot be streamed", "prompt_logprobs")
        sampling["prompt_logprobs"] = prompt_logprobs


def _read_structure(fields: Fields, tools: Tools) -> dict[str, Any] | None:
    structure = read_structure(fields)
    forced = tools.structure()
    if forced is None:
        return structure
    if structure is not None:
        raise ParameterError(
            f"'tool_choice' {tools.use.value} already says what the answer must be: leave response_format out",
            "tool_choice" if tools.use is ToolUse.REQUIRED else "response_format",
        )
    return forced


_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def read_tools(fields: Fields) -> Tools:
    """`tools`, `tool_choice`, `parallel_tool_calls`, or what they were before. Raises ParameterError."""
    is_legacy = fields.has("functions") or fields.has("function_call")
    if is_legacy and (fields.has("tools") or fields.has("tool_choice")):
        raise ParameterError("'functions' and 'function_call' are what 'tools' and 'tool_choice' were", "functions")
    if is_legacy:
        functions = fields.objects("functions", MAX_TOOLS) or ()
        tools: tuple[dict[str, Any], ...] = tuple(
            {"type": "function", "function": _read_function(function)} for function in functions
        )
    else:
        tools = tuple(_read_tool(tool) for tool in fields.objects("tools", MAX_TOOLS) or ())
    names = [tool["function"]["name"] for tool in tools]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        what = "functions" if is_legacy else "tools"
        raise ParameterError(f"'{what}' has two functions of the name '{repeated}'", what)
    use, chosen = _read_function_call(fields, names) if is_legacy else _read_choice(fields, names)
    is_parallel = fields.flag("parallel_tool_calls", True) and not is_legacy
    if use is ToolUse.NONE:
        # Functions that the model must not call are left out of its prompt.
        return Tools()
    if isinstance(chosen, frozenset):
        return Tools(tuple(tool for tool in tools if tool["function"]["name"] in chosen), use, "", is_parallel)
    return Tools(tools, use, chosen, is_parallel, is_legacy)


def _read_tool(fields: Fields) -> dict[str, Any]:
    fields.need("type", "function")
    fields.word("type", ("function",))
    fields.need("function", "an object with name and parameters")
    function = fields.fields("function")
    assert function is not None, "it is there"
    _read_function(function)
    return dict(fields.document)


def _read_function(function: Fields) -> dict[str, Any]:
    function.need("name", "a string")
    name = function.text("name") or ""
    if _NAME.fullmatch(name) is None:
        raise function.wrong("name", "1 to 128 letters, digits, underscores, dots or dashes", name)
    function.text("description")
    function.flag("strict")
    if function.has("parameters"):
        check_schema(function, "parameters", function.mapping("parameters"))
    return dict(function.document)


def _read_function_call(fields: Fields, names: list[str]) -> tuple[ToolUse, str]:
    """What `tool_choice` was before there were tools."""
    choice = fields.document.get("function_call")
    if choice is None or isinstance(choice, str):
        word = fields.word("function_call", ("none", "auto")) or "auto"
        return (ToolUse(word) if names else ToolUse.NONE), ""
    named = fields.fields("function_call")
    assert named is not None, "it is there"
    return ToolUse.NAMED, _read_name(named, names)


def _read_choice(fields: Fields, names: list[str]) -> tuple[ToolUse, str | frozenset[str]]:
    """The use, and the name to call, or the names that alone may be called."""
    choice = fields.document.get("tool_choice")
    if choice is None:
        return (ToolUse.AUTO if names else ToolUse.NONE), ""
    if isinstance(choice, str):
        use = ToolUse(fields.word("tool_choice", ("none", "auto", "required")))
        if use is ToolUse.REQUIRED and not names:
            raise ParameterError("'tool_choice' required needs 'tools'", "tool_choice")
        return (use if names else ToolUse.NONE), ""
    named = fields.fields("tool_choice")
    assert named is not None, "it is there"
    named.need("type", "function")
    if named.word("type", ("function", "allowed_tools")) == "allowed_tools":
        return _read_allowed(named, names)
    named.need("function", "an object with the name")
    function = named.fields("function")
    assert function is not None, "it is there"
    return ToolUse.NAMED, _read_name(function, names)


def _read_allowed(fields: Fields, names: list[str]) -> tuple[ToolUse, frozenset[str]]:
    """Those of the tools that may, or must, be called this time."""
    # OpenAI's chat has the members in an object of their own, its newer API beside the type.
    allowed = fields.fields("allowed_tools") or fields
    allowed.need("mode", "auto or required")
    allowed.need("tools", "an array of tools by name")
    use = ToolUse(allowed.word("mode", ("auto", "required")))
    found = [_read_name(tool.fields("function") or tool, names) for tool in allowed.objects("tools", len(names)) or ()]
    if not found:
        raise allowed.wrong("tools", "an array that is not empty", found)
    return use, frozenset(found)


def _read_name(function: Fields, names: list[str]) -> str:
    function.need("name", "the name of one of the tools")
    name = function.text("name") or ""
    if name not in names:
        raise function.wrong("name", f"the name of one of the tools ({', '.join(names) or 'there are none'})", name)
    return name
