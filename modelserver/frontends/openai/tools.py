"""`tools` and `tool_choice` of a chat, and what they were before, checked."""

from __future__ import annotations

import re
from typing import Any

from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.tools import Tools, ToolUse
from modelserver.frontends.openai.limits import OpenAiLimits
from modelserver.frontends.openai.structure import check_schema

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def read_tools(fields: Fields, limits: OpenAiLimits) -> Tools:
    """`tools`, `tool_choice`, `parallel_tool_calls`, or what they were before. Raises ParameterError."""
    is_legacy = fields.has("functions") or fields.has("function_call")
    if is_legacy and (fields.has("tools") or fields.has("tool_choice")):
        raise ParameterError("'functions' and 'function_call' are what 'tools' and 'tool_choice' were", "functions")
    if is_legacy:
        functions = fields.objects("functions", limits.max_tools) or ()
        tools: tuple[dict[str, Any], ...] = tuple(
            {"type": "function", "function": _read_function(function)} for function in functions
        )
    else:
        tools = tuple(_read_tool(tool) for tool in fields.objects("tools", limits.max_tools) or ())
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
