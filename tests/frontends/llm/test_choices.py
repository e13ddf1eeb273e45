"""What a model says becomes events in their order, however its text is cut."""

from __future__ import annotations

from itertools import groupby

import pytest

from modelserver.frontends.llm.choices import Choice, Said, Usage
from modelserver.frontends.llm.events import Event, Finish, Reasoning, Text, Tokens, ToolDelta, ToolEnd
from modelserver.frontends.llm.reasoning import REASONING_FORMATS, ReasoningReader
from modelserver.frontends.llm.token_deltas import TokenDelta
from modelserver.frontends.llm.tool_constrained import RequiredToolReader
from modelserver.frontends.llm.tool_formats import TOOL_FORMATS
from modelserver.frontends.llm.tool_text import ToolTextReader

CALLING = (
    "<think>They want two.</think>Let me look."
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


def agent(**options: bool) -> Choice:
    """A choice of a model that reasons and calls tools."""
    return Choice(
        0,
        0,
        reasoning=ReasoningReader(REASONING_FORMATS["qwen3"], is_inside=False),
        tools=ToolTextReader(TOOL_FORMATS["hermes"], {}),
        **options,
    )


def read(choice: Choice, text: str, size: int, *, reason: str = "stop") -> list[Event]:
    events: list[Event] = []
    for at in range(0, len(text), size):
        events += choice.take(TokenDelta(0, text[at : at + size]))
    return events + choice.take(TokenDelta(0, "", reason))


def joined(events: list[Event]) -> list[object]:
    """Pieces of one text as one, and calls by name and arguments."""
    found: list[object] = []
    for kind, group in groupby(events, type):
        if kind is Text or kind is Reasoning:
            found.append((kind.__name__, "".join(event.text for event in group)))  # type: ignore[union-attr]
        elif kind is ToolDelta:
            calls = list(group)
            found.append((calls[0].name, "".join(call.arguments for call in calls)))  # type: ignore[union-attr]
        else:
            found += group
    return found


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_order_of_events_is_that_of_the_text(size: int) -> None:
    assert joined(read(agent(), CALLING, size)) == [
        ("Reasoning", "They want two."),
        ("Text", "Let me look."),
        ("f", '{"a": 1}'),
        ToolEnd(0),
        ("g", "{}"),
        ToolEnd(1),
        Finish("stop", None, has_calls=True),
    ]


def test_reasoning_that_is_not_wanted_is_left_out_and_still_known() -> None:
    choice = agent(tells_reasoning=False)
    assert not any(isinstance(event, Reasoning) for event in read(choice, CALLING, 5))
    assert choice.reasoning == "They want two."


def test_a_constrained_call_is_told_as_it_comes() -> None:
    choice = Choice(0, 0, tools=RequiredToolReader())
    choice.take(TokenDelta(0, '[{"name": "f", "parameters": {"a"'))
    assert [event.arguments for event in choice.take(TokenDelta(0, ": 1}")) if isinstance(event, ToolDelta)] == [": 1}"]
    assert choice.take(TokenDelta(0, "}]", "length")) == [ToolEnd(0), Finish("length", None, has_calls=True)]


def test_plain_text_is_one_event_for_each_delta() -> None:
    choice = Choice(0, 0)
    assert choice.take(TokenDelta(0, "a")) == [Text("a")]
    assert choice.take(TokenDelta(0, "")) == []
    assert choice.take(TokenDelta(0, "b", "stop", "END")) == [Text("b"), Finish("stop", "END", has_calls=False)]
    assert choice.is_finished
    assert choice.take(TokenDelta(0, "late")) == []


def test_tokens_come_with_the_text_that_they_are_of() -> None:
    choice = Choice(0, 0, has_tokens=True)
    entry = {"token": "a", "logprob": -1.0}
    assert choice.take(TokenDelta(0, "a", logprobs=[entry], token_ids=[7])) == [Text("a"), Tokens([7], [entry])]
    assert choice.take(TokenDelta(0, "b")) == [Text("b")]


def test_an_echo_comes_first_and_once() -> None:
    choice = Choice(0, 0, echo="So ")
    assert choice.take(TokenDelta(0, "")) == [Text("So ")]
    assert choice.take(TokenDelta(0, "it is")) == [Text("it is")]


def test_what_was_said_is_one_text_and_one_entry_for_each_call() -> None:
    said = Said()
    said.add(read(agent(), CALLING, 4))
    assert (said.text, said.reasoning) == ("Let me look.", "They want two.")
    assert [(call.name, call.arguments) for call in said.calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert said.finish == Finish("stop", None, has_calls=True)
    said.forget_text()
    assert said.is_silent


def test_usage_sums_over_prompts_and_choices() -> None:
    usage = Usage()
    usage.take(0, TokenDelta(0, num_input_tokens=5, num_output_tokens=1, num_cached_tokens=4))
    usage.take(0, TokenDelta(1, num_input_tokens=5, num_output_tokens=2, num_cached_tokens=4))
    usage.take(1, TokenDelta(0, num_input_tokens=3, token_ids=[1, 2]))
    assert (usage.num_input_tokens, usage.num_output_tokens, usage.num_cached_tokens) == (8, 5, 4)
