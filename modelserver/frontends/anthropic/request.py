"""The body of `POST /v1/messages`, checked. Unknown members and betas are ignored, as clients send new ones early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from modelserver.frontends.llm.call import GenerateCall
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import MAX_INT64, Fields, Range
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.pictures import joined, read_picture
from modelserver.frontends.llm.prompts import joined_messages
from modelserver.frontends.llm.tools import Tools, ToolUse

_MAX_MESSAGES = 4096
_MAX_BLOCKS = 4096
_MAX_TOOLS = 512
_MAX_STOPS = 64
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")
# A line that some clients put before the system prompt, with a value of its own in each request: no prefix of a prompt
# would ever be found in the cache again.
_BILLING_LINE = "x-anthropic-billing-header:"

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """What the model is asked. `stops` are the client's own stop sequences."""

    call: GenerateCall
    stops: frozenset[str]


def read_request(fields: Fields, model: LanguageModel) -> MessagesRequest:
    """Raises ParameterError for the first thing that is wrong."""
    fields.need("max_tokens", "an integer")
    sampling: dict[str, Any] = {
        "max_tokens": fields.integer("max_tokens", Range(1, MAX_INT64)),
        "temperature": fields.number("temperature", Range(0, 2)),
        "top_p": fields.number("top_p", Range(0, 1, is_open=True)),
        "top_k": fields.integer("top_k", Range(0, MAX_INT64)) or None,
        "stop": [each for each in fields.texts("stop_sequences", _MAX_STOPS) or () if each] or None,
    }
    tools = _read_tools(fields)
    structure = tools.structure() or _read_format(fields)
    if structure is not None:
        sampling["structured_outputs"] = structure
    call = GenerateCall(
        conversation=read_conversation(fields, model, tools),
        sampling={name: value for name, value in sampling.items() if value is not None},
        tools=tools,
        is_streamed=fields.flag("stream"),
    )
    return MessagesRequest(call, frozenset(sampling["stop"] or ()))


def read_conversation(fields: Fields, model: LanguageModel, tools: Tools | None = None) -> dict[str, Any]:
    """What chat templates take. Raises ParameterError."""
    fields.need("messages", "an array of messages")
    messages: list[Message] = []
    system = _read_system(fields)
    if system:
        messages.append({"role": "system", "content": system})
    given = fields.objects("messages", _MAX_MESSAGES) or []
    if not given:
        raise fields.wrong("messages", "an array that is not empty", [])
    for message in given:
        messages += _read_message(message)
    messages = joined_messages(messages)
    is_prefilled = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    conversation: dict[str, Any] = {
        "messages": messages,
        "add_generation_prompt": not is_prefilled,
        "continue_final_message": is_prefilled,
    }
    tools = _read_tools(fields) if tools is None else tools
    if tools.tools:
        conversation["tools"] = list(tools.tools)
    arguments = _read_thinking(fields, model)
    if arguments:
        conversation["chat_template_kwargs"] = arguments
    return conversation


def _read_thinking(fields: Fields, model: LanguageModel) -> dict[str, Any]:
    """The arguments of the chat template: a model reasons only if the client asks for it."""
    thinking = fields.fields("thinking")
    kind = "disabled" if thinking is None else thinking.word("type", _THINKING)
    output = fields.fields("output_config")
    effort = None if output is None else output.word("effort", _EFFORTS)
    arguments: dict[str, Any] = {}
    if model.reasoning_parser:
        arguments["enable_thinking"] = kind != "disabled"
    if effort is not None:
        arguments["reasoning_effort"] = effort
    return arguments


def _read_format(fields: Fields) -> dict[str, Any] | None:
    output = fields.fields("output_config")
    form = None if output is None else output.fields("format")
    if form is None:
        return None
    form.need("type", "json_schema")
    form.word("type", ("json_schema",))
    form.need("schema", "a JSON schema, which is an object")
    return {"json": form.mapping("schema")}


def _read_system(fields: Fields) -> str:
    value = fields.document.get("system")
    if value is None:
        return ""
    if isinstance(value, str):
        texts = [value]
    else:
        texts = [_text_of(block) for block in fields.objects("system", _MAX_BLOCKS) or ()]
    return "\n\n".join(text for text in map(_without_billing, texts) if text)


def _without_billing(text: str) -> str:
    if not text.startswith(_BILLING_LINE):
        return text
    return text.partition("\n")[2].lstrip("\n")


def _text_of(block: Fields) -> str:
    block.need("type", "text")
    block.word("type", ("text",))
    block.need("text", "a string")
    return block.text("text") or ""


def _read_message(fields: Fields) -> list[Message]:
    """One message, or several: results of tools are messages of their own to templates.

    Agents have the system say something between the turns. Templates know it at the beginning only, so it is the
    user's.
    """
    fields.need("role", "user or assistant")
    role = fields.word("role", ("user", "assistant", "system")) or ""
    role = "user" if role == "system" else role
    fields.need("content", "a string or an array of blocks")
    content = fields.document["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = fields.objects("content", _MAX_BLOCKS) or []
    return [_read_answer(blocks)] if role == "assistant" else _read_question(role, blocks)


def _read_question(role: str, blocks: list[Fields]) -> list[Message]:
    found: list[Message] = []
    parts: list[str | dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "tool_result":
            found.append(_read_result(block))
        elif kind == "text":
            parts.append(_text_of(block))
        elif kind == "document":
            parts.append(_read_document(block))
        elif kind == "image":
            parts.append(_read_image(block))
        # What Anthropic's own servers add, such as search results, means nothing to other models.
    if parts or not found:
        found.append({"role": role, "content": joined(parts)})
    return found


def _read_result(block: Fields) -> Message:
    block.need("tool_use_id", "the id of a tool_use block")
    value = block.document.get("content")
    parts: list[str | dict[str, Any]]
    if value is None or isinstance(value, str):
        parts = [value or ""]
    else:
        given = [part for part in block.objects("content", _MAX_BLOCKS) or () if _kind(part) in ("text", "image")]
        parts = [_text_of(part) if _kind(part) == "text" else _read_image(part) for part in given]
    content = joined(parts)
    if block.flag("is_error"):
        content = f"Error: {content}" if isinstance(content, str) else joined(["Error:", *parts])
    return {"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content}


def _read_image(block: Fields) -> dict[str, Any]:
    block.need("source", "an object with base64 or a URL")
    source = block.fields("source")
    assert source is not None, "it is there"
    source.need("type", "base64 or url")
    kind = source.word("type", ("base64", "url"))
    return read_picture(source, "data" if kind == "base64" else "url")


def _read_document(block: Fields) -> str:
    block.need("source", "an object")
    source = block.fields("source")
    assert source is not None, "it is there"
    if source.text("type") != "text":
        raise _refused(block, "only documents whose source is text are read")
    title = block.text("title")
    text = source.text("data") or ""
    return f"{title}\n\n{text}" if title else text


def _read_answer(blocks: list[Fields]) -> Message:
    texts: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "text":
            texts.append(_text_of(block))
        elif kind == "thinking":
            thinking.append(block.text("thinking") or "")
        elif kind == "tool_use":
            block.need("name", "a string")
            function = {"name": block.text("name"), "arguments": block.mapping("input") or {}}
            calls.append({"id": block.text("id") or "", "type": "function", "function": function})
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thinking:
        # Templates know it by either name.
        message["reasoning"] = message["reasoning_content"] = "\n".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _kind(block: Fields) -> str:
    block.need("type", "the kind of block")
    return block.text("type") or ""


def _refused(block: Fields, why: str) -> ParameterError:
    return ParameterError(f"'{block.path('type')}': {why}", block.path("type"), Fault.UNSUPPORTED_CONTENT)


def _read_tools(fields: Fields) -> Tools:
    """The client's own tools. Tools that Anthropic's servers run, such as web_search, are left out: no model here
    can call them."""
    given = fields.objects("tools", _MAX_TOOLS) or []
    tools = tuple(_read_tool(tool) for tool in given if (tool.text("type") or "custom") == "custom")
    names = [tool["function"]["name"] for tool in tools]
    choice = fields.fields("tool_choice")
    if choice is None:
        return Tools(tools, ToolUse.AUTO) if tools else Tools()
    choice.need("type", "auto, any, tool or none")
    kind = choice.word("type", ("auto", "any", "tool", "none"))
    is_parallel = not choice.flag("disable_parallel_tool_use")
    if kind == "none" or (kind == "auto" and not tools):
        return Tools()
    if not tools:
        raise ParameterError(f"'tool_choice' {kind} needs 'tools'", "tool_choice")
    if kind != "tool":
        use = ToolUse.REQUIRED if kind == "any" else ToolUse.AUTO
        return Tools(tools, use, "", is_parallel)
    name = choice.text("name") or ""
    if name not in names:
        raise choice.wrong("name", f"the name of one of the tools ({', '.join(names)})", name)
    return Tools(tools, ToolUse.NAMED, name, is_parallel)


def _read_tool(tool: Fields) -> dict[str, Any]:
    tool.need("name", "a string")
    function: dict[str, Any] = {"name": tool.text("name")}
    description = tool.text("description")
    if description:
        function["description"] = description
    function["parameters"] = tool.mapping("input_schema") or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object; of a model that wrote something else, an object with its text."""
    try:
        arguments = orjson.loads(text or "{}")
    except ValueError:
        return {"text": text}
    return arguments if isinstance(arguments, dict) else {"value": arguments}
