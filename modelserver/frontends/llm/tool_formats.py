"""How families of models write calls of tools: one table of their marks, and what is between them -> calls."""

from __future__ import annotations

import ast
import enum
import json
import re
import warnings
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


class NotACallError(ValueError):
    """The text looked like a call and is none."""


def call_of(item: Any) -> FunctionCall:
    """The call that an object of name and arguments is."""
    if not isinstance(item, dict):
        raise NotACallError
    name = item.get("name")
    arguments: Any = next((item[key] for key in ("arguments", "parameters") if key in item), {})
    if isinstance(arguments, str):
        arguments = loads(arguments)
    return make_call(name, {} if arguments is None else arguments)


def make_call(name: Any, arguments: Any) -> FunctionCall:
    """A call of these. Raises NotACallError, as all functions here do, for what cannot be one."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise NotACallError
    return FunctionCall(name.encode("utf-8", "replace").decode(), _dumps(arguments))


def _dumps(arguments: dict[str, Any]) -> str:
    """As JSON of which every character can be sent. Infinity, which JSON does not have, makes it no call."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which models write as an escape
        return json.dumps(arguments)
    except (ValueError, RecursionError):
        raise NotACallError from None
    return text


def loads(text: str) -> Any:
    """What a JSON text says."""
    try:
        # Models write line breaks into strings as they are.
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise NotACallError from None


def calls_in_python(text: str) -> list[FunctionCall]:
    """The calls in a list as Python writes it, with literals for arguments."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings that Python does not know
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            raise NotACallError
        return [_call_in_python(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        raise NotACallError from None


def _call_in_python(node: ast.expr) -> FunctionCall:
    if not isinstance(node, ast.Call) or node.args:
        raise NotACallError
    arguments: dict[Any, Any] = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise NotACallError
    return make_call(ast.unparse(node.func), arguments)


def typed(text: str, schema: Any) -> Any:
    """The value of an argument in markup, which does not tell a string from a number: the schema does."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text


class Layout(enum.Enum):
    """What is between the marks."""

    OBJECTS = enum.auto()  # {"name": ..., "arguments": {...}}, or an array of those
    NAMED = enum.auto()  # a name, as `head` says, and an object of arguments
    PYTHON = enum.auto()  # [name(argument=1), other()]
    MARKUP = enum.auto()  # a name and arguments in tags, up to `close`


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opens` are marks after which calls follow; `between` what may stand between and after calls and says nothing.

    `bare`: a text that begins with one of these characters may be calls without a mark. `head` matches what precedes
    the arguments, `call` and `argument` what is in markup from `call_open` to `close`, each with a group `name`.
    `has_special_tokens`: marks are tokens that are left out of the text unless it is asked for.
    """

    layout: Layout
    opens: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    bare: str = ""
    head: re.Pattern[str] | None = None
    call_open: str = ""
    close: str = ""
    call: re.Pattern[str] | None = None
    argument: re.Pattern[str] | None = None
    has_special_tokens: bool = False
    id_len: int = 24
    id_prefix: str = "call_"


_HERMES = ToolFormat(Layout.OBJECTS, opens=("<tool_call>",), between=("</tool_call>", "<tool_call>"))
_QWEN_XML = ToolFormat(
    Layout.MARKUP,
    opens=("<tool_call>",),
    between=("</tool_call>", "<tool_call>"),
    call_open="<function=",
    close="</function>",
    call=re.compile(r"\s*<function=(?P<name>[^>\s]+)>(?P<body>.*)", re.DOTALL),
    argument=re.compile(
        r"<parameter=(?P<name>[^>]+)>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
    ),
)
_DEEPSEEK_MARKS = tuple(
    f"<\uff5ctool\u2581{mark}\uff5c>"
    for mark in ("calls\u2581begin", "call\u2581begin", "call\u2581end", "calls\u2581end")
)
_DEEPSEEK_OPENS = _DEEPSEEK_MARKS[:2]
_DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_LLAMA3 = ToolFormat(
    Layout.OBJECTS,
    opens=("<|python_tag|>",),
    between=(";", ",", "<|python_tag|>", "<|eom_id|>"),
    bare="{",
    has_special_tokens=True,
)

# The name of calls in channels, which `HarmonyReader` reads.
HARMONY_CALLS = "openai"
# By the name in the model's parameter `tool_parser`; the names are vLLM's.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen2": _HERMES,
    "qwen3": _HERMES,
    "longcat": ToolFormat(
        Layout.OBJECTS,
        opens=("<longcat_tool_call>",),
        between=("</longcat_tool_call>", "<longcat_tool_call>"),
    ),
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "glm45": ToolFormat(
        Layout.MARKUP,
        opens=("<tool_call>",),
        between=("<tool_call>",),
        close="</tool_call>",
        call=re.compile(r"\s*(?P<name>[^\s<]+)(?P<body>.*)", re.DOTALL),
        argument=re.compile(r"<arg_key>(?P<name>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.DOTALL),
    ),
    "llama3_json": _LLAMA3,
    "llama4_json": _LLAMA3,
    "mistral": ToolFormat(
        Layout.NAMED,
        opens=("[TOOL_CALLS]",),
        between=("[TOOL_CALLS]", "</s>"),
        head=re.compile(r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*"),
        has_special_tokens=True,
        id_len=9,
        id_prefix="",
    ),
    "deepseek_v3": ToolFormat(
        Layout.NAMED,
        opens=_DEEPSEEK_OPENS,
        between=(*_DEEPSEEK_MARKS, "```"),
        head=re.compile(r"\w+" + _DEEPSEEK_SEPARATOR + r"(?P<name>[^\s<`{]+)\s*```(?:json)?\s*"),
        has_special_tokens=True,
    ),
    "deepseek_v31": ToolFormat(
        Layout.NAMED,
        opens=_DEEPSEEK_OPENS,
        between=_DEEPSEEK_MARKS,
        head=re.compile(r"(?P<name>[^\s<`{]+)" + _DEEPSEEK_SEPARATOR + r"\s*"),
        has_special_tokens=True,
    ),
    "kimi_k2": ToolFormat(
        Layout.NAMED,
        opens=("<|tool_calls_section_begin|>",),
        between=("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"),
        head=re.compile(r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"),
        has_special_tokens=True,
    ),
    "granite": ToolFormat(
        Layout.OBJECTS,
        opens=("<|tool_call|>", "<tool_call>"),
        between=("<|tool_call|>", "<tool_call>", "</tool_call>"),
        has_special_tokens=True,
    ),
    "jamba": ToolFormat(Layout.OBJECTS, opens=("<tool_calls>",), between=("</tool_calls>",)),
    "internlm": ToolFormat(
        Layout.OBJECTS,
        opens=("<|action_start|><|plugin|>",),
        between=("<|action_end|>",),
        has_special_tokens=True,
    ),
    "phi4_mini_json": ToolFormat(Layout.OBJECTS, opens=("functools",)),
    "pythonic": ToolFormat(Layout.PYTHON, opens=("<|python_start|>",), between=("<|python_end|>",), bare="["),
    "llama4_pythonic": ToolFormat(Layout.PYTHON, opens=("<|python_start|>",), between=("<|python_end|>",), bare="["),
}
