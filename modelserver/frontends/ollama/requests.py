"""Parts of a request that generate, chat and embed share, checked; `options` become parameters by vLLM's names.
And how much one request may ask for."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from modelserver.config.ollama_options import check_option, is_option, sampling_of
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.llm.errors import Fault, ParameterError
from modelserver.frontends.llm.fields import Fields, Range
from modelserver.frontends.llm.models import LanguageModel
from modelserver.frontends.llm.pictures import Picture, joined, picture_part
from modelserver.frontends.llm.tools import Tools, ToolUse

logger = logging.getLogger(__name__)

_ROLES = ("system", "user", "assistant", "tool")
_EFFORTS = ("low", "medium", "high", "max")
Message = dict[str, Any]


def read_sampling(fields: Fields) -> dict[str, Any]:
    """Options, log-probabilities and the form of the text. Raises ParameterError."""
    sampling = read_options(fields)
    num_top = fields.integer("top_logprobs", Range(0, MAX_LOGPROBS))
    if fields.flag("logprobs"):
        sampling["logprobs"] = num_top or 0
    elif num_top:
        raise ParameterError("'top_logprobs' needs logprobs: true", "top_logprobs")
    structure = _read_format(fields)
    if structure is not None:
        sampling["structured_outputs"] = structure
    return sampling


def _read_format(fields: Fields) -> dict[str, Any] | None:
    value = fields.document.get("format")
    if value is None or value == "":
        return None
    if value == "json":
        return {"json_object": True}
    if not isinstance(value, dict):
        # The first clause is Ollama's.
        raise ParameterError(f'invalid format: {value!r:.60}; expected "json" or a valid JSON Schema object', "format")
    return {"json": value}


def read_thinking(fields: Fields, model: LanguageModel) -> dict[str, Any]:
    """The arguments of the chat template that `think` sets. Raises ParameterError."""
    value = fields.document.get("think")
    if value is None:
        return {}
    if not isinstance(value, bool) and value not in _EFFORTS:
        raise fields.wrong("think", f"true, false, or one of {', '.join(_EFFORTS)}", value)
    if value is not False and not model.reasoning_parser:
        raise ParameterError(
            f'"{fields.text("model")}" does not support thinking: its config has no parameter reasoning_parser',
            "think",
            Fault.UNSUPPORTED_PARAMETER,
        )
    arguments: dict[str, Any] = {"enable_thinking": value is not False}
    if isinstance(value, str):
        arguments["reasoning_effort"] = value
    return arguments


def with_images(fields: Fields, text: str) -> str | list[dict[str, Any]]:
    """The content of a message: its text behind the pictures of `images`, in base64. Raises ParameterError."""
    images = fields.texts("images", MAX_IMAGES) or []
    parts = [picture_part(Picture(image, fields.path(f"images[{index}]"))) for index, image in enumerate(images)]
    return joined([*parts, text])


def read_messages(fields: Fields) -> list[Message]:
    """`messages` as chat templates take them; none if there are none. Raises ParameterError."""
    return [_read_message(message) for message in fields.objects("messages", MAX_MESSAGES) or ()]


def _read_message(fields: Fields) -> Message:
    fields.need("role", f"one of {', '.join(_ROLES)}")
    role = fields.text("role") or ""
    message: Message = {"role": role, "content": with_images(fields, fields.text("content") or "")}
    name, call_id, thinking = fields.text("tool_name"), fields.text("tool_call_id"), fields.text("thinking")
    if name:
        message["name"] = name
    if call_id:
        message["tool_call_id"] = call_id
    if thinking:
        # Templates know it by either name.
        message["reasoning"] = message["reasoning_content"] = thinking
    calls = fields.objects("tool_calls", MAX_TOOL_CALLS)
    if calls:
        message["tool_calls"] = [_read_call(call) for call in calls]
    return message


def _read_call(fields: Fields) -> dict[str, Any]:
    fields.need("function", "an object with name and arguments")
    function = fields.fields("function")
    assert function is not None, "it is there"
    function.need("name", "a string")
    called = {"name": function.text("name"), "arguments": function.mapping("arguments") or {}}
    return {"id": fields.text("id") or "", "type": "function", "function": called}


def read_tools(fields: Fields) -> Tools:
    """`tools`, of which the model chooses. Raises ParameterError."""
    tools = tuple(_read_tool(tool) for tool in fields.objects("tools", MAX_TOOLS) or ())
    return Tools(tools, ToolUse.AUTO) if tools else Tools()


def _read_tool(fields: Fields) -> dict[str, Any]:
    fields.need("function", "an object with name and parameters")
    function = fields.fields("function")
    assert function is not None, "it is there"
    function.need("name", "a string")
    function.text("name")
    function.text("description")
    function.mapping("parameters")
    return {"type": "function", "function": dict(function.document)}


_DURATION = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+", re.ASCII)
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_options(fields: Fields) -> dict[str, Any]:
    """The sampling parameters that `options` asks for. Unknown options are logged, as Ollama does.

    Raises ParameterError for a value of the wrong type, and for a sampler that this server does not have.
    """
    options = fields.fields("options")
    found: dict[str, Any] = {}
    for name, value in options.document.items() if options is not None else ():
        if value is None:
            continue
        if not is_option(name):
            logger.warning("invalid option provided: option=%.100s", name)
            continue
        try:
            found[name] = check_option(name, value)
        except InvalidArgumentError as error:
            raise ParameterError(error.message, f"options.{name}", Fault.INVALID_VALUE) from None
    return {"max_tokens": None, **sampling_of(found)}


def read_keep_alive(fields: Fields) -> float | None:
    """`keep_alive` in seconds: infinite for a negative one, None without one. Raises ParameterError."""
    value = fields.document.get("keep_alive")
    if value is None:
        return None
    if type(value) in (int, float):
        seconds = float(value)
    elif isinstance(value, str) and value == "0":
        seconds = 0.0
    elif isinstance(value, str) and _DURATION.fullmatch(value):
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(value))
        seconds = -seconds if value.startswith("-") else seconds
    else:
        raise fields.wrong("keep_alive", 'a number of seconds, or a duration such as "5m"', value)
    return math.inf if seconds < 0 else seconds


MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_TOOL_CALLS = 512
MAX_IMAGES = 64
MAX_INPUTS = 2048
MAX_LOGPROBS = 20
MAX_CONTEXT = 1 << 22
