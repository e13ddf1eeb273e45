"""Calls of tools in every format, however the text is cut into pieces."""

from __future__ import annotations

import json
import re
from typing import Any

import hypothesis
import orjson
import pytest
from hypothesis import strategies

from modelserver.frontends.llm.events import Delta
from modelserver.frontends.llm.tool_formats import TOOL_FORMATS
from modelserver.frontends.llm.tool_text import ToolTextReader

SCHEMAS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
PARIS = ("weather", {"city": "Paris", "days": 3})
TRICKY = ("weather", {"city": 'a "quoted" ]}</tool_call> \\ name', "days": 0})
NOW: tuple[str, dict[str, Any]] = ("now", {})

Calls = list[tuple[str, dict[str, Any]]]


def objects(*calls: tuple[str, dict[str, Any]], key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}) for name, arguments in calls]


def tagged(start: str, end: str, *calls: tuple[str, dict[str, Any]], key: str = "arguments") -> str:
    return "\n".join(f"{start}{text}{end}" for text in objects(*calls, key=key))


def array(*calls: tuple[str, dict[str, Any]]) -> str:
    return f"[{', '.join(objects(*calls))}]"


BAR, GAP = "\uff5c", "\u2581"


def mark(words: str) -> str:
    return f"<{BAR}{words.replace(' ', GAP)}{BAR}>"


def deepseek(*calls: tuple[str, dict[str, Any]], is_old: bool) -> str:
    texts = []
    for name, arguments in calls:
        text = json.dumps(arguments)
        body = (
            f"function{mark('tool sep')}{name}\n```json\n{text}\n```" if is_old else f"{name}{mark('tool sep')}{text}"
        )
        texts.append(mark("tool call begin") + body + mark("tool call end"))
    return mark("tool calls begin") + "\n".join(texts) + mark("tool calls end")


def kimi(*calls: tuple[str, dict[str, Any]]) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(texts) + "<|tool_calls_section_end|>"


def coder(*calls: tuple[str, dict[str, Any]]) -> str:
    texts = []
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        texts.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(texts)


def glm(*calls: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items())
        + "</tool_call>"
        for name, arguments in calls
    )


HERMES = ("<tool_call>\n", "\n</tool_call>")
# Parser, text, what of it is for the user, and the calls.
CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", tagged(*HERMES, PARIS), "", [PARIS]),
    ("hermes", "Let me see.\n\n" + tagged(*HERMES, PARIS, NOW), "Let me see.", [PARIS, NOW]),
    ("hermes", tagged(*HERMES, TRICKY) + "\nDone.", "Done.", [TRICKY]),
    ("qwen3", tagged(*HERMES, PARIS), "", [PARIS]),
    ("longcat", tagged("<longcat_tool_call>", "</longcat_tool_call>", PARIS, NOW), "", [PARIS, NOW]),
    ("llama3_json", objects(PARIS, key="parameters")[0], "", [PARIS]),
    ("llama3_json", "<|python_tag|>" + "; ".join(objects(PARIS, TRICKY, key="parameters")), "", [PARIS, TRICKY]),
    ("llama4_json", " " + objects(PARIS)[0] + "<|eom_id|>", "", [PARIS]),
    ("mistral", "[TOOL_CALLS] " + array(PARIS, TRICKY), "", [PARIS, TRICKY]),
    ("mistral", 'Well. [TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now{}', "Well.", [PARIS, NOW]),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}</s>", "", [NOW]),
    ("deepseek_v3", "Hm." + deepseek(PARIS, TRICKY, is_old=True), "Hm.", [PARIS, TRICKY]),
    ("deepseek_v31", deepseek(PARIS, NOW, is_old=False), "", [PARIS, NOW]),
    ("kimi_k2", kimi(PARIS, TRICKY), "", [PARIS, TRICKY]),
    ("granite", "<|tool_call|>" + array(PARIS), "", [PARIS]),
    ("jamba", "<tool_calls>" + array(PARIS, NOW) + "</tool_calls>", "", [PARIS, NOW]),
    ("internlm", tagged("<|action_start|><|plugin|>", "<|action_end|>", PARIS, key="parameters"), "", [PARIS]),
    ("phi4_mini_json", "functools" + array(PARIS), "", [PARIS]),
    ("qwen3_coder", "I look.\n" + coder(PARIS, NOW), "I look.", [PARIS, NOW]),
    ("glm45", glm(PARIS, NOW), "", [PARIS, NOW]),
    ("pythonic", "[weather(city='Paris', days=3), now()]", "", [PARIS, NOW]),
    ("llama4_pythonic", '<|python_start|>[weather(city="Paris", days=3)]<|python_end|>', "", [PARIS]),
    # What looks like calls and is none.
    ("hermes", "a <tool_call> b", "a <tool_call> b", []),
    ("hermes", '<tool_call>\n{"name": "weather", "argu', '<tool_call>\n{"name": "weather", "argu', []),
    ("hermes", '<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
    ("hermes", tagged(*HERMES, PARIS) + '\n<tool_call>\n{"name"', '{"name"', [PARIS]),
    ("hermes", "1 < 2 <tool", "1 < 2 <tool", []),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", '{"name": "nobody", "parameters": {}}', '{"name": "nobody", "parameters": {}}', []),
    ("llama3_json", 'It is {"name": "weather"}', 'It is {"name": "weather"}', []),
    ("mistral", "[TOOL_CALLS] what", "[TOOL_CALLS] what", []),
    ("pythonic", "[1] says so", "[1] says so", []),
    ("pythonic", "[weather(**x)]", "[weather(**x)]", []),
    ("pythonic", "[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
    ("hermes", "a <tool_call> b " + tagged(*HERMES, PARIS), "a <tool_call> b", [PARIS]),
    ("mistral", "[TOOL_CALLS]" + "a" * 1000 + "{}", "[TOOL_CALLS]" + "a" * 1000 + "{}", []),
    ("qwen3_coder", "<tool_call>\n<nothing>", "<tool_call>\n<nothing>", []),
    *(
        (name, "Just text, with <angles> and [lists] {x}.  \n", "Just text, with <angles> and [lists] {x}.  \n", [])
        for name in TOOL_FORMATS
    ),
]


def read(name: str, pieces: list[str], *, is_parallel: bool = True) -> tuple[str, Calls, list[Delta]]:
    reader = ToolTextReader(TOOL_FORMATS[name], SCHEMAS, is_parallel=is_parallel)
    deltas = [*(reader.push(piece) for piece in pieces), reader.finish()]
    content = "".join(delta.content for delta in deltas)
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.calls):
        if call.id:
            assert call.index == len(names)
            names[call.index] = call.name
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    return content, [(names[index], json.loads(arguments[index])) for index in names], deltas


def cut(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def test_every_format_has_a_case() -> None:
    assert {name for name, _, _, calls in CASES if calls} >= TOOL_FORMATS.keys() - {"qwen", "qwen2", "qwen3_xml"}


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_calls_are_found(name: str, text: str, content: str, calls: Calls, size: int) -> None:
    assert read(name, cut(text, size))[:2] == (content, calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), [case for case in CASES if case[3]])
def test_every_call_is_whole_when_it_is_told(name: str, text: str, content: str, calls: Calls) -> None:
    for delta in read(name, cut(text, 1))[2]:
        for start, arguments in zip(delta.calls[::2], delta.calls[1::2], strict=True):
            assert start.id
            assert (start.name, json.loads(arguments.arguments)) in calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": 1e999}}</tool_call>'),
        ("pythonic", "[weather(days=1e999)]"),
        ("glm45", "<tool_call>weather<arg_key>days</arg_key><arg_value>1e999</arg_value></tool_call>"),
        ("pythonic", "[weather(days={1, 2})]"),
        ("pythonic", "[weather(" + "(" * 500 + ")" * 500 + ")]"),
    ],
)
def test_what_has_no_json_is_no_call(name: str, text: str) -> None:
    assert read(name, cut(text, 4))[:2] == (text, [])


def test_arguments_can_be_sent_whatever_they_are() -> None:
    text = '<tool_call>{"name": "w\\ud800", "arguments": {"city": "\\ud800"}}</tool_call>'
    (delta,) = [delta for delta in read("hermes", [text])[2] if delta.calls]
    assert orjson.loads(orjson.dumps(delta.calls))
    assert json.loads(delta.calls[1].arguments) == {"city": "\ud800"}
    assert read("pythonic", [r"[weather(city='\d')]"])[1] == [("weather", {"city": r"\d"})]


def test_only_one_call_where_they_are_not_parallel() -> None:
    text = tagged(*HERMES, PARIS, NOW, TRICKY)
    assert read("hermes", cut(text, 3), is_parallel=False)[:2] == ("", [PARIS])


def test_ids_are_as_templates_want_them() -> None:
    for name, pattern in (("hermes", r"call_\w{24}"), ("mistral", r"\w{9}")):
        text = next(text for parser, text, _, calls in CASES if parser == name and calls)
        ids = [call.id for delta in read(name, [text])[2] for call in delta.calls if call.id]
        assert ids
        assert all(re.fullmatch(pattern, each) for each in ids)


@hypothesis.given(
    name=strategies.sampled_from(sorted(TOOL_FORMATS)),
    parts=strategies.lists(
        strategies.one_of(
            strategies.sampled_from(sorted({mark for each in TOOL_FORMATS.values() for mark in each.opens})),
            strategies.sampled_from(sorted({mark for each in TOOL_FORMATS.values() for mark in each.between})),
            strategies.sampled_from([*objects(PARIS, TRICKY), "{", "[", '"', "now()", "<function=now>", "</function>"]),
            strategies.text(max_size=5),
        ),
        max_size=8,
    ),
    size=strategies.integers(1, 9),
)
def test_any_text_reads_the_same_however_it_is_cut(name: str, parts: list[str], size: int) -> None:
    text = "".join(parts)
    assert read(name, cut(text, size))[:2] == read(name, [text])[:2]
