"""Channels of harmony, however the text is cut: reasoning, text, and calls whose arguments are told as they come."""

from __future__ import annotations

import pytest

from modelserver.frontends.llm.events import Delta
from modelserver.frontends.llm.harmony import HarmonyReader

ANALYSIS = "<|channel|>analysis<|message|>I think.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
SIZES = (1, 3, 7, 1000)


def call(name: str, arguments: str, end: str = "<|call|>") -> str:
    return f"<|start|>assistant<|channel|>commentary to={name} <|constrain|>json<|message|>{arguments}{end}"


def read(text: str, size: int, *, has_calls: bool = True, is_parallel: bool = True) -> tuple[str, str, dict[str, str]]:
    """Reasoning, text, and the arguments of each call, all of different functions."""
    reader = HarmonyReader(has_calls=has_calls, is_parallel=is_parallel)
    deltas = [reader.push(text[at : at + size]) for at in range(0, len(text), size)] + [reader.finish()]
    names: dict[int, str] = {}
    arguments: dict[str, str] = {}
    for each in (each for delta in deltas for each in delta.calls):
        if each.name:
            assert each.id.startswith("call_")
            names[each.index] = each.name
        arguments[names[each.index]] = arguments.get(names[each.index], "") + each.arguments
    return said(deltas, "reasoning"), said(deltas, "content"), arguments


def said(deltas: list[Delta], kind: str) -> str:
    return "".join(getattr(delta, kind) for delta in deltas)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (ANALYSIS + FINAL, "I think.", "Yes."),
        (FINAL.removeprefix("<|start|>assistant"), "", "Yes."),
        ("<|channel|>analysis<|message|>It never ends", "It never ends", ""),
        (ANALYSIS + "<|start|>assistant<|chan", "I think.", ""),
        (ANALYSIS + "<|start|>assistant" + ANALYSIS + FINAL, "I think.\n\nI think.", "Yes."),
        ("<|channel|>commentary<|message|>First, I look.<|end|>" + FINAL, "", "First, I look.\n\nYes."),
        ("<|channel|>final<|message|>a <|e b", "", "a <|e b"),
        # What is constrained has no channels, and another model's text none either.
        ('{"a": "<|end|>"}', "", '{"a": "<|end|>"}'),
        ("toss", "", "toss"),
        ("<|channel|>final", "", "<|channel|>final"),
        ("", "", ""),
    ],
)
def test_reasoning_and_text(text: str, size: int, reasoning: str, content: str) -> None:
    assert read(text, size) == (reasoning, content, {})


@pytest.mark.parametrize("size", SIZES)
def test_calls(size: int) -> None:
    text = ANALYSIS + call("functions.weather", '{"city": "Bern"}') + call("functions.now", "", "<|end|>")
    assert read(text, size) == ("I think.", "", {"weather": '{"city": "Bern"}', "now": "{}"})
    assert read(text, size, is_parallel=False)[2] == {"weather": '{"city": "Bern"}'}
    assert read(text, size, has_calls=False)[1:] == ('{"city": "Bern"}', {})
    before = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}'
    assert read(before, size)[2] == {"weather": '{"city": "Bern"}'}
    assert read(call("browser.search", '{"q": 1}'), size) == ('{"q": 1}', "", {})


def test_arguments_are_told_as_they_come() -> None:
    reader = HarmonyReader(has_calls=True)
    begun = reader.push(call("functions.f", '{"a": ', ""))
    assert [(each.name, each.arguments) for each in begun.calls] == [("f", ""), ("", '{"a": ')]
    assert [each.arguments for each in reader.push("1}<|ca").calls] == ["1}"]
    assert reader.push("ll|>").is_empty


def test_tokens_of_reasoning_are_those_between_headers_and_ends() -> None:
    """A token is a word here; 1 2 is the header of the analysis, 9 the end of a message."""
    reader = HarmonyReader(has_calls=True)
    reader.push(ANALYSIS + FINAL)
    assert reader.count([1, 2, 5, 5, 5, 9, 3, 4, 1, 2, 6, 9, 3, 7], [1, 2], [9]) == 4
    assert reader.count([5, 5, 9], [1, 2], [9]) is None
    assert HarmonyReader(has_calls=True).count([5, 5], [1, 2], [9]) == 0
