"""A template in Go's language as the chat template of a model: what Ollama gives it, and what can be told from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from modelserver.backend import InvalidArgumentError

from .go_functions import JsonMap, Record
from .go_nodes import Action, Body, Branch, Chain, Include, Pipe, Statement, Text, cut_after, names_in
from .go_syntax import TemplateError
from .go_template import GoTemplate, check_limits
from .template_sandbox import LimitError, TemplateLimits

_RESPONSE = "{{ .Response }}"
# How calls of tools begin in a template -> the format, by its name in the parameter `tool_parser`.
_TOOL_TAGS = {
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    "functools": "phi4_mini_json",
    "<|tool_call|>": "granite",
    "<longcat_tool_call>": "longcat",
    "<tool_calls>": "jamba",
    "<|action_start|>": "internlm",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>": "deepseek_v3",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "{": "llama3_json",
}
# The tag before reasoning -> the format, by its name in the parameter `reasoning_parser`; the second where the template
# writes the tag itself.
_REASONING_TAGS = {
    "<think>": ("qwen3", "deepseek_r1"),
    "[THINK]": ("mistral", "mistral"),
    "<seed:think>": ("seed_oss", "seed_oss"),
    "\u25c1think\u25b7": ("kimi", "kimi"),
    "<|channel|>analysis<|message|>": ("openai_gptoss", "openai_gptoss"),
}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a model's template says of the model: names of formats, empty where it has none."""

    tool_parser: str = ""
    reasoning_parser: str = ""
    has_suffix: bool = False


class OllamaTemplate:
    """Renders conversations. Raises InvalidArgumentError, with line and column, for a wrong template."""

    def __init__(self, source: str, limits: TemplateLimits | None = None) -> None:
        limits = limits or TemplateLimits()
        try:
            template = GoTemplate(source, limits)
            if not {"messages", "response"} & _names(template):
                # Ollama lets such templates end in the answer.
                template = GoTemplate(source + _RESPONSE, limits)
        except TemplateError as error:
            raise InvalidArgumentError(f"the model's template, {error.message}") from None
        self._template = template
        self.source = source

    @cached_property
    def traits(self) -> TemplateTraits:
        names = _names(self._template)
        tag, reasoning = _tool_tag(self._template.body), _reasoning_tag(self._template.body)
        known = _REASONING_TAGS.get(reasoning or "", ("", ""))
        return TemplateTraits(
            tool_parser=next((name for start, name in _TOOL_TAGS.items() if tag.startswith(start)), "")
            if "tools" in names
            else "",
            reasoning_parser=known[bool(reasoning) and self._ends_in(reasoning)],
            has_suffix="suffix" in names,
        )

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> str:
        """The text of a conversation. `variables` may have `enable_thinking`, `reasoning_effort` and `suffix`.

        With a `suffix` the last message is what precedes it. Raises InvalidArgumentError where the template fails.
        """
        thinks = variables.get("enable_thinking")
        effort = variables.get("reasoning_effort")
        common = {
            "Think": bool(self.traits.reasoning_parser) if thinks is None else bool(thinks),
            "ThinkLevel": effort if isinstance(effort, str) else "",
            "IsThinkSet": thinks is not None or bool(self.traits.reasoning_parser),
            "Response": "",
        }
        system, turns = _collated(messages)
        suffix = variables.get("suffix")
        if isinstance(suffix, str) and suffix and turns and turns[-1]["content"]:
            return self._execute({**common, "Prompt": turns[-1]["content"], "Suffix": suffix})
        if "messages" in _names(self._template):
            records = [_message(turn) for turn in turns]
            return self._execute({**common, "System": system, "Messages": records, "Tools": _tools(tools or ())})
        return self._by_turns(turns, common)

    def _by_turns(self, turns: Sequence[Mapping[str, Any]], common: dict[str, Any]) -> str:
        """Templates that know one turn: a system message, a prompt and a response. The last ends with its response."""
        texts: list[str] = []
        turn = {"System": "", "Prompt": "", "Response": ""}
        for message in turns:
            role, content = message["role"], message["content"]
            is_full = turn["Response"] or (turn["Prompt"] and role == "system")
            if is_full and role in ("system", "user"):
                texts.append(self._execute({**common, **turn}))
                turn = dict.fromkeys(turn, "")
            name = {"system": "System", "user": "Prompt", "assistant": "Response"}.get(role)
            if name:
                turn[name] = content
        last, _ = cut_after(self._template.body, "Response")
        texts.append(self._execute({**common, **turn}, last))
        return "".join(texts)

    def _execute(self, data: Mapping[str, Any], body: Body | None = None) -> str:
        try:
            return self._template.execute(data, body)
        except TemplateError as error:
            raise InvalidArgumentError(f"the model's template fails on these messages: {error.message}") from None
        except (LimitError, RecursionError) as error:
            raise InvalidArgumentError(
                f"the model's template {check_limits(error).message}: send fewer or shorter messages"
            ) from None

    def _ends_in(self, tag: str) -> bool:
        return self._template.source.rstrip().removesuffix("{{ end }}").rstrip().endswith(tag)


def _names(template: GoTemplate) -> set[str]:
    bodies = (template.body, *template.defined.values())
    return {name.lower() for body in bodies for name in names_in(body)}


# The values of a template.


def _collated(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """All system messages as one text, and the messages, of which neighbours of one role are one, except tools'."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        turn = {**message, "content": message.get("content") or ""}
        if turns and turns[-1]["role"] == turn["role"] != "tool":
            turns[-1]["content"] += "\n\n" + turn["content"]
        else:
            turns.append(turn)
    texts = [message.get("content") or "" for message in messages if message["role"] == "system"]
    return "\n\n".join(texts), turns


def _message(message: Mapping[str, Any]) -> Record:
    calls = [_call(call, number) for number, call in enumerate(message.get("tool_calls") or ())]
    fields = {
        "Role": message["role"],
        "Content": message["content"],
        "Thinking": message.get("thinking") or "",
        "Images": [],
        "ToolCalls": calls,
        "ToolName": message.get("name") or "",
        "ToolCallID": message.get("tool_call_id") or "",
    }
    document = {"role": fields["Role"], "content": fields["Content"]}
    more = {"thinking": fields["Thinking"], "tool_calls": [call.document for call in calls]}
    more |= {"tool_name": fields["ToolName"], "tool_call_id": fields["ToolCallID"]}
    return Record("Message", fields, document | {name: value for name, value in more.items() if value})


def _call(call: Any, number: int) -> Record:
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    arguments = JsonMap(arguments) if isinstance(arguments, dict) else JsonMap()
    document = {"index": number, "name": function.get("name") or "", "arguments": arguments}
    fields = {"Index": number, "Name": document["name"], "Arguments": arguments}
    identity = {"id": call["id"]} if isinstance(call, dict) and call.get("id") else {}
    return Record(
        "ToolCall",
        {"ID": identity.get("id", ""), "Function": Record("ToolCallFunction", fields, document)},
        {**identity, "function": document},
    )


def _tools(tools: Sequence[Any]) -> list[Record]:
    return [_tool(tool) for tool in tools if isinstance(tool, dict)]


def _tool(tool: Mapping[str, Any]) -> Record:
    described = tool.get("function")
    described = described if isinstance(described, dict) else {}
    given = described.get("parameters")
    given = given if isinstance(given, dict) else {}
    properties = given.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    records = JsonMap({name: _property(_property_document(value)) for name, value in properties.items()})
    parameters = {"type": given.get("type") or "", **_present(given, "$defs", "items", "required")}
    parameters["properties"] = records
    function = {
        "name": described.get("name") or "",
        "description": described.get("description") or "",
        "parameters": parameters,
    }
    document = {"type": tool.get("type") or "", **_present(tool, "items"), "function": function}
    parameter_fields = {
        "Type": parameters["type"],
        "Defs": given.get("$defs"),
        "Items": given.get("items"),
        "Required": given.get("required") or [],
        "Properties": records,
    }
    function_fields = {
        "Name": function["name"],
        "Description": function["description"],
        "Parameters": Record("ToolFunctionParameters", parameter_fields, parameters),
    }
    fields = {
        "Type": document["type"],
        "Items": tool.get("items"),
        "Function": Record("ToolFunction", function_fields, function),
    }
    return Record("Tool", fields, document)


def _property_document(schema: Any) -> dict[str, Any]:
    """The members of a property's schema that Ollama keeps, in its order."""
    if not isinstance(schema, dict):
        return {}
    found = _present(schema, "anyOf", "type", "items", "description", "enum", "properties", "required")
    if isinstance(found.get("anyOf"), list):
        found["anyOf"] = [_property_document(each) for each in found["anyOf"]]
    if isinstance(found.get("properties"), dict):
        found["properties"] = {name: _property_document(each) for name, each in found["properties"].items()}
    return found


def _property(document: Mapping[str, Any]) -> Record:
    kinds = document.get("type") or ""
    fields = {
        "AnyOf": [_property(each) for each in document.get("anyOf") or ()],
        "Type": kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds,
        "Items": document.get("items"),
        "Description": document.get("description") or "",
        "Enum": document.get("enum") or [],
        "Properties": JsonMap({name: _property(each) for name, each in (document.get("properties") or {}).items()}),
        "Required": document.get("required") or [],
    }
    return Record("ToolProperty", fields, document)


def _present(members: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: members[name] for name in names if members.get(name)}


# What a template says of its model.


def _tool_tag(body: Body) -> str:
    """What stands before a call of a tool in the history; "{" where nothing does."""
    branch = next(_branches(body, "ToolCalls"), None)
    text = _first_text(branch.body) if branch is not None else ""
    return text.partition("{")[0].strip() or "{"


def _branches(body: Body, name: str) -> Iterator[Branch]:
    for statement in body:
        if isinstance(statement, Branch):
            if statement.kind == "if" and name in _fields_of(statement.pipe):
                yield statement
            yield from _branches(statement.body, name)
            yield from _branches(statement.otherwise, name)


def _first_text(body: Body) -> str:
    """The first text that is not blank, up to the first value."""
    for statement in body:
        match statement:
            case Text(text=text) if text.strip():
                return text
            case Branch():
                return _first_text(statement.body) or _first_text(statement.otherwise)
            case Action(pipe=pipe) if not pipe.variables:
                return ""
            case Include():
                return ""
    return ""


def _reasoning_tag(body: Body, *, is_in_messages: bool = False) -> str:
    """What stands before the reasoning of a message, if something stands behind it too; else an empty text."""
    for statement in body:
        if isinstance(statement, Branch):
            of_messages = is_in_messages or (statement.kind == "range" and "Messages" in _fields_of(statement.pipe))
            for inner in (statement.body, statement.otherwise):
                if found := _reasoning_tag(inner, is_in_messages=of_messages):
                    return found
        elif is_in_messages and isinstance(statement, Action) and "Thinking" in _fields_of(statement.pipe):
            return _surrounding(body)
    return ""


def _surrounding(body: Sequence[Statement]) -> str:
    first, last = body[0], body[-1]
    if not isinstance(first, Text) or not isinstance(last, Text) or not last.text.strip():
        return ""
    return first.text.strip()


def _fields_of(pipe: Pipe) -> Iterator[str]:
    return (
        name
        for command in pipe.commands
        for argument in command
        if isinstance(argument, Chain)
        for name in (*argument.fields, *(_fields_of(argument.base) if isinstance(argument.base, Pipe) else ()))
    )
