"""How families of models write calls of tools: one table, read by `tool_text`."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


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
