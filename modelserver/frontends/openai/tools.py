"""The tools that a model may call, whether it must, and the constraint that makes it do so."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from modelserver.frontends.openai.errors import ParameterError
from modelserver.frontends.openai.fields import Fields
from modelserver.frontends.openai.limits import OpenAiLimits
from modelserver.frontends.openai.sampling import unsupported
from modelserver.frontends.openai.structure import check_schema

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_ANY_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


class ToolUse(enum.Enum):
    """What `tool_choice` asks for."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tools:
    """`tools` as the client sent them; `name` is the one to call when `use` is NAMED."""

    tools: tuple[dict[str, Any], ...] = ()
    use: ToolUse = ToolUse.NONE
    name: str = ""
    is_parallel: bool = True

    @property
    def functions(self) -> dict[str, dict[str, Any]]:
        """The schema of each function's parameters."""
        return {tool["function"]["name"]: _object_schema(tool["function"].get("parameters")) for tool in self.tools}

    def structure(self) -> dict[str, Any] | None:
        """The constraint on the text: arguments of the named tool, an array of calls, or none."""
        if self.use is ToolUse.NAMED:
            return {"json": self.functions[self.name]}
        if self.use is not ToolUse.REQUIRED:
            return None
        definitions: dict[str, Any] = {}
        calls = [
            _call_schema(name, schema, f"tool_{index}", definitions)
            for index, (name, schema) in enumerate(self.functions.items())
        ]
        schema: dict[str, Any] = {
            "type": "array",
            "minItems": 1,
            "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        }
        if not self.is_parallel:
            schema["maxItems"] = 1
        if definitions:
            schema["$defs"] = definitions
        return {"json": schema}


def read_tools(fields: Fields, limits: OpenAiLimits) -> Tools:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a request. Raises ParameterError."""
    for name in ("functions", "function_call"):
        if fields.document.get(name):
            raise unsupported(fields, name, "use tools and tool_choice")
    tools = tuple(_read_tool(tool) for tool in fields.objects("tools", limits.max_tools) or ())
    names = [tool["function"]["name"] for tool in tools]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ParameterError(f"'tools' has two functions of the name '{repeated}'", "tools")
    use, name = _read_choice(fields, names)
    is_parallel = fields.flag("parallel_tool_calls", True)
    if use is ToolUse.NONE:
        # The model is not told of what it must not call.
        return Tools()
    return Tools(tools, use, name, is_parallel)


def _read_tool(fields: Fields) -> dict[str, Any]:
    fields.need("type", "function")
    fields.word("type", ("function",))
    fields.need("function", "an object with name and parameters")
    function = fields.fields("function")
    assert function is not None, "it is there"
    function.need("name", "a string")
    name = function.text("name") or ""
    if _NAME.fullmatch(name) is None:
        raise function.wrong("name", "1 to 128 letters, digits, underscores, dots or dashes", name)
    function.text("description")
    function.flag("strict")
    if function.has("parameters"):
        check_schema(function, "parameters", function.mapping("parameters"))
    return dict(fields.document)


def _read_choice(fields: Fields, names: list[str]) -> tuple[ToolUse, str]:
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
    if named.text("type") == "allowed_tools":
        raise unsupported(named, "type", "send the tools that are allowed as tools")
    named.word("type", ("function",))
    named.need("function", "an object with the name")
    function = named.fields("function")
    assert function is not None, "it is there"
    function.need("name", "the name of one of the tools")
    name = function.text("name") or ""
    if name not in names:
        raise function.wrong("name", f"the name of one of the tools ({', '.join(names) or 'there are none'})", name)
    return ToolUse.NAMED, name


def _object_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of arguments, which are an object whether it says so or not."""
    if not parameters:
        return _ANY_OBJECT
    return parameters if "type" in parameters or "$ref" in parameters else {"type": "object", **parameters}


def _call_schema(name: str, parameters: dict[str, Any], key: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one call. A schema that refers to parts of itself moves to `definitions`, where they are found."""
    if _refers(parameters):
        definitions[key] = _moved(parameters, f"#/$defs/{key}")
        parameters = {"$ref": f"#/$defs/{key}"}
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _refers(schema: Any) -> bool:
    if isinstance(schema, dict):
        return "$ref" in schema or any(map(_refers, schema.values()))
    return isinstance(schema, list) and any(map(_refers, schema))


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself pointing to `place`, where it is now."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }
