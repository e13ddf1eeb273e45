"""The messages of a conversation, checked and brought into the form that chat templates expect."""

from __future__ import annotations

from typing import Any

import orjson

from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.pictures import joined, read_picture
from modelserver.frontends.openai.limits import MAX_MESSAGES

_ROLES = ("developer", "system", "user", "assistant", "tool", "function")
# Templates may know others, such as ipython: the model says whether its own does.
_MAX_ROLE_LEN = 64
# What OpenAI calls developer now is the system of every template, and what it called function their tool.
_RENAMED = {"developer": "system", "function": "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_OTHER_PARTS = ("input_audio", "audio_url", "video_url", "file", "input_file")
_PICTURE_PARTS = ("image_url", "input_image", "image")
_MAX_PARTS = 4096
_MAX_CALLS = 512

Message = dict[str, Any]


def read_messages(fields: Fields) -> list[Message]:
    """`messages` of a request. Raises ParameterError."""
    fields.need("messages", "an array of messages")
    messages = fields.objects("messages", MAX_MESSAGES)
    assert messages is not None, "it is there"
    if not messages:
        raise fields.wrong("messages", "an array that is not empty", [])
    return [_read_message(message) for message in messages]


def _read_message(fields: Fields) -> Message:
    fields.need("role", f"one of {', '.join(_ROLES)}")
    role = fields.text("role") or ""
    if not 0 < len(role) <= _MAX_ROLE_LEN:
        raise fields.wrong("role", f"one of {', '.join(_ROLES)}, or another that the model's template knows", role)
    content = read_text(fields, "content") if role == "assistant" else read_content(fields, "content")
    message: Message = {"role": _RENAMED.get(role, role), "content": content}
    for name in ("name", "tool_call_id"):
        text = fields.text(name)
        if text is not None:
            message[name] = text
    if role == "assistant":
        _read_assistant(fields, message)
    if message["content"] is None:
        if role != "assistant" or not ("tool_calls" in message or "reasoning_content" in message):
            raise fields.wrong("content", "a string or an array of parts", None)
        message["content"] = ""
    return message


def _read_assistant(fields: Fields, message: Message) -> None:
    """What only answers of the model have: calls of tools, a refusal, reasoning."""
    reasoning = fields.text("reasoning") or fields.text("reasoning_content")
    if reasoning:
        # Templates know it by either name.
        message["reasoning"] = message["reasoning_content"] = reasoning
    refusal = fields.text("refusal")
    if refusal and not message["content"]:
        message["content"] = refusal
    calls = fields.objects("tool_calls", _MAX_CALLS)
    if calls:
        message["tool_calls"] = [_read_call(call) for call in calls]
    legacy = fields.fields("function_call")
    if legacy is not None and not calls:
        message["tool_calls"] = [{"id": "", "type": "function", "function": _read_called(legacy)}]


def _read_call(fields: Fields) -> dict[str, Any]:
    fields.need("function", "an object with name and arguments")
    fields.word("type", ("function",))
    function = fields.fields("function")
    assert function is not None, "it is there"
    return {"id": fields.text("id") or "", "type": "function", "function": _read_called(function)}


def _read_called(function: Fields) -> dict[str, Any]:
    function.need("name", "a string")
    return {"name": function.text("name"), "arguments": _read_arguments(function)}


def _read_arguments(function: Fields) -> dict[str, Any]:
    """The arguments of an earlier call as an object, since templates write it as JSON themselves."""
    given = function.document.get("arguments")
    if given is None or given == "":
        return {}
    if isinstance(given, dict):
        return given
    text = function.text("arguments") or ""
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise function.wrong("arguments", "a string with a JSON object", text)
    return arguments


def read_content(fields: Fields, name: str) -> str | list[dict[str, Any]] | None:
    """A member that is a string or has parts: texts become a line each, and with pictures it has parts.

    Raises ParameterError.
    """
    content = fields.document.get(name)
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.wrong(name, "a string or an array of parts", content)
    return joined([_read_part(part) for part in fields.objects(name, _MAX_PARTS) or ()])


def read_text(fields: Fields, name: str) -> str | None:
    """The same of a member that has no pictures. Raises ParameterError."""
    content = read_content(fields, name)
    if isinstance(content, list):
        raise ParameterError(f"'{fields.path(name)}' must be text", fields.path(name), Fault.UNSUPPORTED_CONTENT)
    return content


def _read_part(part: Fields) -> str | dict[str, Any]:
    part.need("type", "text")
    kind = part.text("type") or ""
    if kind in _PICTURE_PARTS:
        return _read_picture(part, kind)
    if kind in _OTHER_PARTS:
        raise ParameterError(
            f"'{part.path('type')}' is '{kind}': the models here take text and pictures only",
            part.path("type"),
            Fault.UNSUPPORTED_CONTENT,
        )
    member = _TEXT_PARTS.get(kind)
    if member is None:
        raise part.wrong("type", "text", kind)
    part.need(member, "a string")
    return part.text(member) or ""


def _read_picture(part: Fields, kind: str) -> dict[str, Any]:
    """`image_url` is an object with a URL for chats, and the URL itself for responses. `detail` is for other models."""
    name = "image" if kind == "image" else "image_url"
    part.need(name, "a data: URL")
    inner = part.fields(name) if isinstance(part.document[name], dict) else None
    return read_picture(part, name) if inner is None else read_picture(inner, "url")
