"""Calls of tools in constrained text, told piece by piece."""

from __future__ import annotations

import json

import pytest

from modelserver.frontends.llm.events import Delta
from modelserver.frontends.llm.tool_constrained import NamedToolReader, RequiredToolReader

CALLS = [
    ("weather", {"city": 'Pa"ris \\ ]}', "list": [1, {"a": []}]}),
    ("now", {}),
    ('odd "name"', {"text": "line\nline", "é": None}),
]


def read(reader: NamedToolReader | RequiredToolReader, text: str, size: int) -> list[Delta]:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [*(reader.push(piece) for piece in pieces), reader.finish()]


def joined(deltas: list[Delta]) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.id:
            assert call.index == len(calls)
            calls.append((call.name, call.arguments))
        else:
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + call.arguments)
    return calls


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_array_of_calls(size: int, indent: int | None) -> None:
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in CALLS], indent=indent)
    deltas = read(RequiredToolReader(), text, size)
    assert [(name, json.loads(arguments)) for name, arguments in joined(deltas)] == CALLS
    assert not any(delta.content for delta in deltas)


def test_arguments_come_as_they_are_generated() -> None:
    reader = RequiredToolReader()
    assert reader.push('[{"name": "f"').calls[0].name == "f"
    assert [call.arguments for call in reader.push(', "parameters": {"a"').calls] == ['{"a"']
    assert [call.arguments for call in reader.push(": 1").calls] == [": 1"]
    assert [call.arguments for call in reader.push("}}").calls] == ["}"]
    assert reader.push("]").is_empty


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("no call", "no call"),
        ('[{"name": 1}]', '[{"name": 1}]'),
        ('[{"parameters": {}}]', '[{"parameters": {}}]'),
        ('[{"name": "\\x"}]', '[{"name": "\\x"}]'),
        ('[{"name": "f", "parameters": {}}] and', " and"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_what_no_constraint_lets_through_is_text(text: str, content: str, size: int) -> None:
    assert "".join(delta.content for delta in read(RequiredToolReader(), text, size)) == content


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_the_arguments_of_a_named_function(size: int) -> None:
    deltas = read(NamedToolReader("weather"), ' {"city": "Paris"}', size)
    assert joined(deltas) == [("weather", '{"city": "Paris"}')]


def test_no_text_is_no_call() -> None:
    assert joined(read(NamedToolReader("weather"), "  ", 1)) == []
