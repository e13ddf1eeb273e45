"""`tools` and `tool_choice` of a response. Agents send tools that are not functions; some of them can be served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelserver.frontends.llm.errors import ParameterError
from modelserver.frontends.llm.fields import Fields
from modelserver.frontends.llm.tools import Tools, ToolUse
from modelserver.frontends.openai.limits import MAX_TOOLS
from modelserver.frontends.openai.structure import check_schema

_WORDS = ("none", "auto", "required")
# A custom tool takes free text: to the model it is a function of one text.
_CUSTOM = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Origin:
    """A tool as the client has it: its name, and that of its namespace, if it is in one. `is_custom`: it takes text."""

    name: str
    namespace: str | None
    is_custom: bool


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """`tools` are those that the model may call; `origins` say how the client names each, by the name that the model
    has for it."""

    tools: Tools
    origins: Mapping[str, Origin]


def read_tools(fields: Fields) -> ResponseTools:
    """Tools that only OpenAI's servers run, such as web_search, are left out. Raises ParameterError."""
    found: list[dict[str, Any]] = []
    origins: dict[str, Origin] = {}
    for tool in fields.objects("tools", MAX_TOOLS) or ():
        is_namespace = tool.text("type") == "namespace"
        namespace = tool.text("name") if is_namespace else None
        for member in tool.objects("tools", MAX_TOOLS) or [] if is_namespace else [tool]:
            kind = member.text("type")
            if kind not in ("function", "custom"):
                continue
            described = _custom(member) if kind == "custom" else _function(member)
            function = described["function"]
            origin = Origin(function["name"], namespace, kind == "custom")
            if origin.name in origins and namespace is not None:
                # Two namespaces may have the same name.
                function["name"] = f"{namespace}_{origin.name}"
            origins[function["name"]] = origin
            found.append(described)
    tools = tuple(found)
    names = [tool["function"]["name"] for tool in tools]
    use, chosen = _read_choice(fields, names)
    is_parallel = fields.flag("parallel_tool_calls", True)
    if use is ToolUse.NONE:
        return ResponseTools(Tools(), {})
    if isinstance(chosen, frozenset):
        tools = tuple(tool for tool in tools if tool["function"]["name"] in chosen)
        return ResponseTools(Tools(tools, use, "", is_parallel), origins)
    return ResponseTools(Tools(tools, use, chosen, is_parallel), origins)


def _function(tool: Fields) -> dict[str, Any]:
    tool.need("name", "a string")
    if tool.has("parameters"):
        check_schema(tool, "parameters", tool.mapping("parameters"))
    members = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool.document[name] for name in members if tool.has(name)}}


def _custom(tool: Fields) -> dict[str, Any]:
    tool.need("name", "a string")
    description = tool.text("description") or ""
    form = tool.fields("format")
    if form is not None and form.text("type") == "grammar":
        # The model is told the grammar; its text is not constrained by it.
        description = (
            f"{description}\n\nThe input follows this grammar ({form.text('syntax')}):\n{form.text('definition')}"
        )
    function = {"name": tool.text("name"), "description": description.strip(), "parameters": _CUSTOM}
    return {"type": "function", "function": function}


def _read_choice(fields: Fields, names: list[str]) -> tuple[ToolUse, str | frozenset[str]]:
    choice = fields.document.get("tool_choice")
    if choice is None or isinstance(choice, str):
        use = ToolUse(fields.word("tool_choice", _WORDS) or "auto")
        if use is ToolUse.REQUIRED and not names:
            raise ParameterError("'tool_choice' required needs 'tools'", "tool_choice")
        return (use if names else ToolUse.NONE), ""
    named = fields.fields("tool_choice")
    assert named is not None, "it is there"
    named.need("type", "function, custom or allowed_tools")
    kind = named.text("type")
    if kind in ("function", "custom"):
        return ToolUse.NAMED, _name(named, names)
    if kind == "allowed_tools":
        use = ToolUse(named.word("mode", ("auto", "required")) or "auto")
        allowed = named.objects("tools", len(names)) or []
        return use, frozenset(_name(tool, names) for tool in allowed if tool.text("type") in ("function", "custom"))
    raise named.wrong("type", "function, custom or allowed_tools", kind)


def _name(tool: Fields, names: list[str]) -> str:
    name = tool.text("name") or ""
    if name not in names:
        raise tool.wrong("name", f"the name of one of the tools ({', '.join(names) or 'there are none'})", name)
    return name
