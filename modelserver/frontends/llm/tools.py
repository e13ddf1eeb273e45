"""The tools that a model may call, whether it must, and the constraint that makes it do so."""

from __future__ import annotations

import enum
import secrets
import string
from dataclasses import dataclass
from typing import Any, Protocol

from modelserver.frontends.llm.events import Delta

_ID_ALPHABET = string.ascii_letters + string.digits
_ANY_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


class ToolUse(enum.Enum):
    """What `tool_choice` asks for."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tools:
    """`tools` as the client sent them; `name` is the one to call when `use` is NAMED.

    `is_legacy`: they came as `functions`, and calls go back as `function_call`, of which there is one at most.
    """

    tools: tuple[dict[str, Any], ...] = ()
    use: ToolUse = ToolUse.NONE
    name: str = ""
    is_parallel: bool = True
    is_legacy: bool = False

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


class ToolReader(Protocol):
    """Finds calls of tools in text that comes in pieces, however it is cut."""

    def push(self, text: str) -> Delta:
        """What is certain after this much more text."""

    def finish(self) -> Delta:
        """What is left when there is no more."""


def held_back_len(text: str, marks: tuple[str, ...]) -> int:
    """How much of the end of `text` may be the beginning of one of `marks`."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(mark.startswith(tail) and len(mark) > length for mark in marks):
            return length
    return 0


def make_tool_id(prefix: str = "call_", length: int = 24) -> str:
    """A new id of a call; some templates insist on its length."""
    return prefix + "".join(secrets.choice(_ID_ALPHABET) for _ in range(length))
