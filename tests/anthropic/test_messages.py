"""`/v1/messages` by Anthropic's client: whole and streamed, tools, thinking, prefill, counts, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.mock_llm import say, user

if TYPE_CHECKING:
    import anthropic  # for seconds

TOOLS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "description": "of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def ask(client: anthropic.Anthropic, content: Any, model: str = "mock", **more: Any) -> Any:
    messages = content if isinstance(content, list) else user(content)
    return client.messages.create(model=model, messages=messages, **{"max_tokens": 200, **more})


def reported(client: anthropic.Anthropic, messages: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    """What the model was asked."""
    answer = ask(client, [*(messages or []), {"role": "user", "content": say(report=True)}], **more)
    found: dict[str, Any] = json.loads(answer.content[0].text)
    return found


def test_an_answer_is_a_message_of_blocks(client: anthropic.Anthropic) -> None:
    answer = ask(client, "one two three")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "mock")
    assert answer.id.startswith("msg_")
    assert [(block.type, block.text) for block in answer.content] == [("text", "one two three")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    # The first token of the prompt was known from before.
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (2, 1, 3)


def test_a_stream_builds_the_same_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="mock", messages=user("one two three"), max_tokens=9) as stream:  # type: ignore[arg-type]
        assert list(stream.text_stream) == ["one", " two", " three"]
        message = stream.get_final_message()
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("end_turn", 2, 3)


def test_the_events_of_a_stream_come_in_their_order(http: httpx.Client) -> None:
    asked = {"model": "mock", "max_tokens": 9, "stream": True, "messages": user("one two")}
    answer = http.post("/v1/messages?beta=true", json=asked)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [dict(line.split(": ", 1) for line in each.split("\n")) for each in answer.text.strip().split("\n\n")]
    assert all(json.loads(event["data"])["type"] == event["event"] for event in events)
    assert [event["event"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_for_a_reason(client: anthropic.Anthropic, stream: bool) -> None:
    cases: list[tuple[dict[str, Any], tuple[str, str | None]]] = [
        ({"max_tokens": 2}, ("max_tokens", None)),
        ({"stop_sequences": ["three"]}, ("stop_sequence", "three")),
    ]
    for more, expected in cases:
        arguments: dict[str, Any] = {"model": "mock", "messages": user("one two three"), "max_tokens": 50, **more}
        if stream:
            with client.messages.stream(**arguments) as streamed:
                message = streamed.get_final_message()
        else:
            message = client.messages.create(**arguments)
        assert (message.stop_reason, message.stop_sequence) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_text_and_calls_are_blocks_of_their_own(client: anthropic.Anthropic, stream: bool) -> None:
    said = say(text=f"<think>rain?</think>\n\nLet me see. {CALL}\n{CALL.replace('Oslo', 'Rome')}", cut=3)
    arguments: dict[str, Any] = {
        "model": "agent",
        "max_tokens": 500,
        "messages": user(said),
        "tools": TOOLS,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    if stream:
        with client.messages.stream(**arguments) as streamed:
            message = streamed.get_final_message()
    else:
        message = client.messages.create(**arguments)
    blocks: list[Any] = list(message.content)
    assert [block.type for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0].thinking, blocks[1].text.strip()) == ("rain?", "Let me see.")
    assert blocks[0].signature
    assert [(block.name, block.input) for block in blocks[2:]] == [
        ("weather", {"city": "Oslo"}),
        ("weather", {"city": "Rome"}),
    ]
    assert blocks[2].id != blocks[3].id
    assert message.stop_reason == "tool_use"


def test_a_turn_with_results_reaches_the_template(client: anthropic.Anthropic) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "how is"}, {"type": "text", "text": "Oslo?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "ask", "signature": "s"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": say(report=True)},
            ],
        },
    ]
    answer = ask(client, messages, "agent", system=[{"type": "text", "text": "be brief"}], tools=TOOLS)
    conversation = json.loads(json.loads(answer.content[0].text)["messages"])
    system, asked, called, *told, last = conversation["messages"]
    assert system == {"role": "system", "content": "be brief"}
    assert asked == {"role": "user", "content": "how is\nOslo?"}
    assert (called["content"], called["reasoning_content"]) == ("Let me see.", "ask")
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in told] == [
        ("tool", "t1", "rain"),
        ("tool", "t2", "Error: no"),
    ]
    assert last["role"] == "user"
    assert conversation["tools"][0]["function"]["parameters"] == TOOLS[0]["input_schema"]


def test_thinking_is_on_only_when_it_is_asked_for(client: anthropic.Anthropic) -> None:
    for thinking, expected in (({"type": "adaptive"}, True), ({"type": "disabled"}, False), (None, False)):
        more = {} if thinking is None else {"thinking": thinking}
        conversation = json.loads(reported(client, model="agent", **more)["messages"])
        assert conversation["chat_template_kwargs"]["enable_thinking"] is expected


def test_the_line_that_changes_with_each_request_is_left_out(client: anthropic.Anthropic) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;\n"
    for system in (line + "be brief", [{"type": "text", "text": line}, {"type": "text", "text": "be brief"}]):
        conversation = json.loads(reported(client, system=system)["messages"])
        assert conversation["messages"][0] == {"role": "system", "content": "be brief"}


def test_what_the_system_says_between_the_turns_is_the_user_s_to_templates(client: anthropic.Anthropic) -> None:
    """As coding agents send it, with what they have to say before the question in a block of its own."""
    blocks = [
        {"type": "text", "text": "today"},
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [{"role": "user", "content": blocks}, {"role": "system", "content": "two"}]
    assert ask(client, messages, system="be brief").content[0].text == "today\none\n\ntwo"


def test_the_last_words_of_the_assistant_are_continued(client: anthropic.Anthropic) -> None:
    answer = ask(client, [*user("one"), {"role": "assistant", "content": say(report=True)}])
    conversation = json.loads(json.loads(answer.content[0].text)["messages"])
    assert (conversation["add_generation_prompt"], conversation["continue_final_message"]) == (False, True)


def test_tools_can_be_forced_and_forbidden(client: anthropic.Anthropic) -> None:
    forced = ask(client, say(report=True), tools=TOOLS, tool_choice={"type": "tool", "name": "weather"})
    assert (forced.content[0].type, forced.content[0].name) == ("tool_use", "weather")
    assert forced.content[0].input["sampling_parameters"]["structured_outputs"] == {"json": TOOLS[0]["input_schema"]}
    free = reported(client, model="mock", tools=TOOLS, tool_choice={"type": "none"})
    assert "tools" not in json.loads(free["messages"])
    servers = [{"type": "web_search_20250305", "name": "web_search"}]
    assert "tools" not in json.loads(reported(client, model="mock", tools=servers)["messages"])


def test_sampling_and_the_form_of_the_answer_reach_the_model(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {}}
    form = {"format": {"type": "json_schema", "schema": schema}}
    more = {"output_config": form, "temperature": 0.5, "top_k": 7, "top_p": 0.9}
    asked = reported(client, extra_body=more)
    assert asked["sampling_parameters"] == {
        "max_tokens": 200,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "structured_outputs": {"json": schema},
    }


def test_the_tokens_of_a_prompt_are_counted(client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model="mock", messages=user("one two three")).input_tokens == 3  # type: ignore[arg-type]


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_know(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 600 tokens > 512 maximum"):
        ask(client, " one" * 600)


def test_an_error_after_the_stream_has_begun_is_an_event(http: httpx.Client) -> None:
    asked = {"model": "mock", "max_tokens": 9, "stream": True, "messages": user(say(text="one two three", error=2))}
    *_, last = http.post("/v1/messages", json=asked).text.strip().split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("change", "status", "kind", "message"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "'max_tokens' is missing"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "'max_tokens' must be at least 1"),
        ({"model": "nothing"}, 404, "not_found_error", "nothing"),
        ({"model": "encoder"}, 400, "invalid_request_error", "does not generate text"),
        ({"messages": []}, 400, "invalid_request_error", "'messages' must be an array that is not empty"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "invalid_request_error", "'messages[0].role'"),
        ({"messages": [{"role": "user", "content": 7}]}, 400, "invalid_request_error", "'messages[0].content'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "'messages[0].content[0].source.type' is missing",
        ),
        ({"tools": TOOLS}, 400, "invalid_request_error", "tools: model 'mock' cannot be asked to choose tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "news"}},
            400,
            "invalid_request_error",
            "'tool_choice.name' must be the name of one of the tools (weather)",
        ),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "needs 'tools'"),
        ({"thinking": {"type": "deep"}}, 400, "invalid_request_error", "'thinking.type'"),
    ],
)
def test_wrong_requests_are_refused_in_words(
    http: httpx.Client, change: dict[str, Any], status: int, kind: str, message: str
) -> None:
    body = {"model": "mock", "max_tokens": 9, "messages": user("one"), **change}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == status
    document = answer.json()
    assert (document["type"], document["error"]["type"]) == ("error", kind)
    assert message in document["error"]["message"]


def test_unknown_members_are_ignored(client: anthropic.Anthropic) -> None:
    more = {"context_management": {"edits": []}, "service_tier": "auto", "metadata": {"user_id": "u"}, "container": "c"}
    assert ask(client, "one", extra_body=more).content[0].text == "one"


def test_other_methods_are_refused_in_this_form(http: httpx.Client) -> None:
    answer = http.get("/v1/messages")
    assert (answer.status_code, answer.json()["type"], answer.headers["allow"]) == (405, "error", "POST")
