"""`/v1/responses` by OpenAI's client: items, streams, tools, reasoning, what is kept, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.keys import KeyFile
from support.mock_llm import say, write_mock_llm
from support.serving import running_server

from modelserver.auth.api_keys import Scope

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def reported(response: Any) -> dict[str, Any]:
    """What the model was asked."""
    found: dict[str, Any] = json.loads(response.output_text)
    return found


def test_a_response_is_a_message_with_its_usage(client: openai.OpenAI) -> None:
    response = client.responses.create(model="mock", input="one two three")
    assert (response.object, response.status, response.model) == ("response", "completed", "mock")
    assert response.output_text == "one two three"
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")  # type: ignore[union-attr]
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 3, 6)


def test_the_events_of_a_stream_come_in_their_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="mock", input="one two", stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(10))
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["one", " two"]
    assert events[-1].response.output_text == "one two"  # type: ignore[union-attr]


def test_the_client_builds_the_response_from_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="mock", input="one two three") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "one two three"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_text_and_calls_are_items_of_their_own(client: openai.OpenAI, stream: bool) -> None:
    said = say(text=f"<think>rain?</think>\n\nLet me see. {CALL}\n{CALL.replace('Oslo', 'Rome')}", cut=3)
    arguments: dict[str, Any] = {"model": "agent", "input": said, "tools": [TOOL]}
    if stream:
        events = list(client.responses.create(stream=True, **arguments))
        # The client of JavaScript needs the part before its text.
        assert [event.type.removeprefix("response.") for event in events[2:5]] == [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
        ]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        response = events[-1].response  # type: ignore[union-attr]
        assert [item.model_dump() for item in done] == [item.model_dump() for item in response.output]
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(pieces) == '{"city": "Oslo"}{"city": "Rome"}'
    else:
        response = client.responses.create(**arguments)
    output: list[Any] = list(response.output)
    assert [item.type for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0].content[0].text == "rain?"
    assert output[1].content[0].text.strip() == "Let me see."
    assert [(item.name, json.loads(item.arguments)) for item in output[2:]] == [
        ("weather", {"city": "Oslo"}),
        ("weather", {"city": "Rome"}),
    ]


def test_items_of_a_turn_reach_the_template(client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "how is"}, {"type": "input_text", "text": "Oslo?"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "ask"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "of_tomorrow", "what": 1},
        {"role": "user", "content": say(report=True)},
    ]
    response = client.responses.create(model="agent", instructions="help", input=items, tools=[TOOL])  # type: ignore[list-item]
    conversation = json.loads(reported(response)["messages"])
    first, asked, called, *told, last = conversation["messages"]
    assert first == {"role": "system", "content": "help\n\nbe brief"}
    assert asked == {"role": "user", "content": "how is\nOslo?"}
    assert called["reasoning_content"] == "ask"
    assert [call["function"]["arguments"] for call in called["tool_calls"]] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert [(each["tool_call_id"], each["content"]) for each in told] == [("c1", "rain"), ("c2", "sun")]
    assert last["role"] == "user"
    assert conversation["tools"] == [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]


def test_a_tool_of_free_text_is_called_with_it(client: openai.OpenAI) -> None:
    tools: list[Any] = [
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
        {"type": "web_search"},
        {"type": "namespace", "name": "more", "tools": [TOOL]},
    ]
    text = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
    response = client.responses.create(model="agent", input=say(text=text), tools=tools)
    (item,) = response.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", "*** Begin")  # type: ignore[union-attr]
    asked = client.responses.create(model="agent", input=say(report=True), tools=tools)
    offered = [tool["function"] for tool in json.loads(reported(asked)["messages"])["tools"]]
    assert [function["name"] for function in offered] == ["patch", "weather"]
    assert "start: X" in offered[0]["description"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_names_the_namespace_of_its_tool(client: openai.OpenAI, stream: bool) -> None:
    """As Codex looks for it; two namespaces may have a tool of the same name."""
    patch = {"type": "custom", "name": "patch"}
    tools: list[Any] = [
        {"type": "namespace", "name": "near", "description": "", "tools": [TOOL, patch]},
        {"type": "namespace", "name": "far", "description": "", "tools": [TOOL]},
    ]
    names = ("weather", "far_weather", "patch", "unknown")
    text = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"input": "x"}}}}\n</tool_call>' for name in names
    )
    asked: Any = client.responses.create(model="agent", input=say(text=text), tools=tools, stream=stream)
    response = [*asked][-1].response if stream else asked
    found = [(item.type, item.name, item.namespace) for item in response.output]
    assert found == [
        ("function_call", "weather", "near"),
        ("function_call", "weather", "far"),
        ("custom_tool_call", "patch", "near"),
        ("function_call", "unknown", None),
    ]


def test_what_a_coding_agent_asks_first(client: openai.OpenAI) -> None:
    """As a session begins: several messages of developer and user, ids and members of the agent's own."""
    items: list[Any] = [
        {"type": "message", "id": "msg_1", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in (("developer", "rules"), ("developer", "skills"), ("user", "where it is"))
    ]
    items.append({"type": "message", "id": "msg_4", "role": "user", "content": say(report=True)})
    more = {"client_metadata": {"session": "s"}, "reasoning": {"summary": "auto"}}
    asked = {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "s", "store": False, "extra_body": more}
    given: dict[str, Any] = {"model": "mock", "instructions": "be an agent", "input": items, **asked}
    with client.responses.stream(**given) as stream:
        for _ in stream:
            pass
        text = stream.get_final_response().output_text
    assert text.startswith("where it is\n\ndo: ")


def test_a_response_follows_another(client: openai.OpenAI) -> None:
    first = client.responses.create(model="mock", input="one two", instructions="be brief")
    second = client.responses.create(model="mock", input=say(report=True), previous_response_id=first.id)
    assert second.previous_response_id == first.id
    messages = json.loads(reported(second)["messages"])["messages"]
    assert [(message["role"], message["content"]) for message in messages[:-1]] == [
        ("user", "one two"),
        ("assistant", "one two"),
    ]


def test_a_response_is_kept_until_it_is_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(model="mock", input="one two", metadata={"a": "b"})
    found = client.responses.retrieve(made.id)
    assert (found.output_text, found.metadata) == ("one two", {"a": "b"})
    (item,) = client.responses.input_items.list(made.id).data
    assert item.content[0].text == "one two"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(made.id)
    unkept = client.responses.create(model="mock", input="one", store=False)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.create(model="mock", input="two", previous_response_id=unkept.id)


def test_a_response_belongs_to_its_key(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_mock_llm(root, "mock")
    keys = KeyFile(tmp_path / "keys.yaml")
    one, other = keys.add("one", Scope.INFER), keys.add("other", Scope.INFER)
    with running_server(root, api_keys_file=str(keys.path)) as server:
        url = f"http://{server.http_url}/v1"
        with (
            openai.OpenAI(base_url=url, api_key=one, max_retries=0) as owner,
            openai.OpenAI(base_url=url, api_key=other, max_retries=0) as stranger,
        ):
            made = owner.responses.create(model="mock", input="one")
            assert owner.responses.retrieve(made.id).output_text == "one"
            with pytest.raises(openai.NotFoundError):
                stranger.responses.retrieve(made.id)
            with pytest.raises(openai.NotFoundError):
                stranger.responses.delete(made.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_cut_off_is_incomplete(client: openai.OpenAI, stream: bool) -> None:
    arguments: dict[str, Any] = {"model": "mock", "input": "one two three", "max_output_tokens": 2}
    if stream:
        *_, last = client.responses.create(stream=True, **arguments)
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = client.responses.create(**arguments)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "one two"


def test_structure_sampling_and_effort_reach_the_model(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {}}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    response = client.responses.create(
        model="mock", input=say(report=True), text=form, temperature=0.5, top_p=0.5, reasoning={"effort": "low"}
    )
    asked = reported(response)
    assert asked["sampling_parameters"] == {"temperature": 0.5, "top_p": 0.5, "structured_outputs": {"json": schema}}
    assert json.loads(asked["messages"])["chat_template_kwargs"] == {"reasoning_effort": "low"}
    assert (response.temperature, response.text.format.type) == (0.5, "json_schema")  # type: ignore[union-attr]


def test_logprobs_are_of_the_text(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(
            model="mock", input="one two", stream=True, include=["message.output_text.logprobs"], top_logprobs=1
        )
    )
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [[entry.token for entry in event.logprobs] for event in deltas] == [["one"], [" two"]]
    part = events[-1].response.output[0].content[0]  # type: ignore[union-attr]
    assert [entry.token for entry in part.logprobs or ()] == ["one", " two"]  # type: ignore[union-attr]


def test_the_tokens_of_an_input_are_counted(http: httpx.Client) -> None:
    answer = http.post("/v1/responses/input_tokens", json={"model": "mock", "input": "one two three"})
    assert answer.json() == {"object": "response.input_tokens", "input_tokens": 3}


def test_an_error_after_the_stream_has_begun_ends_it_as_failed(client: openai.OpenAI) -> None:
    *begun, last = client.responses.create(model="mock", input=say(text="one two three", error=2), stream=True)
    assert [event.delta for event in begun if event.type == "response.output_text.delta"] == ["one", " two"]
    assert last.type == "response.failed"
    assert last.response.error is not None


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": 7}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": "one", "model": "nothing"}, 404, "model"),
        ({"input": "one", "model": "encoder"}, 400, "model"),
        ({"input": "one", "background": True, "store": False}, 400, "background"),
        ({"input": "one", "conversation": "conv_1"}, 404, None),
        ({"input": "one", "conversation": {"id": 1}}, 400, "conversation.id"),
        ({"input": "one", "conversation": "conv_1", "previous_response_id": "resp_1"}, 400, "conversation"),
        ({"input": "one", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"input": "one", "tool_choice": "required"}, 400, "tool_choice"),
        ({"input": "one", "tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, 400, "tool_choice.name"),
        ({"input": "one", "text": {"format": {"type": "xml"}}}, 400, "text.format.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0].content[0].image_url"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "["}]}, 400, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, 400, "input[0].call_id"),
    ],
)
def test_wrong_requests_are_refused_by_the_member(
    http: httpx.Client, body: dict[str, Any], status: int, param: str | None
) -> None:
    answer = http.post("/v1/responses", json={"model": "mock", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
