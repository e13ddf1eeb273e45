"""Chat beyond the plain: choices, log-probabilities, reasoning, tools; streamed and whole are the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
import openai
import pytest
from support.mock_llm import say, user

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "$defs": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris \\"P\\""}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def events(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def merged(chunks: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that a stream makes up, as those of a whole answer."""
    found: dict[int, dict[str, Any]] = {}
    for part in (choice for chunk in chunks for choice in chunk["choices"]):
        choice = found.setdefault(part["index"], {"message": {}, "logprobs": None, "finish_reason": None})
        assert choice["finish_reason"] is None, "nothing follows the end"
        message = choice["message"]
        for name, value in part["delta"].items():
            if name == "role":
                message["role"] = value
            elif name == "tool_calls":
                add_calls(message.setdefault("tool_calls", []), value)
            elif name == "function_call":
                add_call(message.setdefault("function_call", {}), value)
            else:
                message[name] = message.get(name, "") + value
        if part["logprobs"] is not None:
            content = choice["logprobs"]["content"] if choice["logprobs"] else []
            choice["logprobs"] = {"content": content + part["logprobs"]["content"], "refusal": None}
        choice["finish_reason"] = part["finish_reason"]
    return found


def add_call(call: dict[str, str], delta: dict[str, str]) -> None:
    for name, value in delta.items():
        call[name] = call.get(name, "") + value


def add_calls(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> None:
    assert len({delta["index"] for delta in deltas}) == len(deltas), "a call is one item of a delta"
    for delta in deltas:
        if "id" in delta:
            assert delta["index"] == len(calls)
            calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
        else:
            calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]


def ask_both(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """The whole answer, after comparing its choices with those of a stream."""
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    streamed = merged(events(http, body))
    assert sorted(streamed) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        assert comparable(streamed[choice["index"]]) == comparable(choice)
    return whole


def comparable(choice: dict[str, Any]) -> dict[str, Any]:
    message = {name: value for name, value in choice["message"].items() if value}
    for call in message.get("tool_calls", []):
        call["id"] = "an id"
    return {"message": message, "logprobs": choice["logprobs"], "finish_reason": choice["finish_reason"]}


def test_choices(http: httpx.Client) -> None:
    answer = ask_both(http, model="mock", messages=user("a b"), n=3)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a b", "1: a b", "2: a b"]
    assert answer["usage"]["completion_tokens"] == 8


def test_stop_and_length(http: httpx.Client) -> None:
    stopped = ask_both(http, model="mock", messages=user("a b END c"), stop=["END"])["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"], stopped["stop_reason"]) == ("a b ", "stop", "END")
    cut = ask_both(http, model="mock", messages=user("a b c"), max_completion_tokens=2)["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("a b", "length")


def test_logprobs(http: httpx.Client) -> None:
    answer = ask_both(http, model="mock", messages=user("é b"), logprobs=True, top_logprobs=2)
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("é", -0.5, [195, 169])
    assert [top["token"] for top in second["top_logprobs"]] == [" b", " other0"]
    none = ask_both(http, model="mock", messages=user("a"), logprobs=True)["choices"][0]["logprobs"]["content"]
    assert none[0]["top_logprobs"] == []
    by_id = ask_both(http, model="mock", messages=user("a"), logprobs=True, return_tokens_as_token_ids=True)
    assert by_id["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")


def test_prompt_logprobs_and_token_ids(http: httpx.Client) -> None:
    body = {"model": "mock", "messages": user("a b"), "prompt_logprobs": 1, "return_token_ids": True}
    answer = http.post(CHAT, json=body).json()
    assert answer["prompt_logprobs"][0] is None
    assert [entry["decoded_token"] for entry in answer["prompt_logprobs"][1].values()] == [" b"]
    ids = answer["choices"][0]["token_ids"]
    assert answer["prompt_token_ids"] == ids
    assert http.post("/detokenize", json={"model": "mock", "tokens": ids}).json() == {"prompt": "a b"}
    streamed = events(http, {"model": "mock", "messages": user("a b"), "return_token_ids": True})
    assert [each for chunk in streamed for each in chunk["choices"][0].get("token_ids", [])] == ids
    assert [chunk["prompt_token_ids"] for chunk in streamed if "prompt_token_ids" in chunk] == [ids]


def test_usage_is_in_streams_that_ask_for_it(http: httpx.Client) -> None:
    body = {"model": "mock", "messages": user("a b")}
    assert all("usage" not in chunk for chunk in events(http, body))
    chunks = events(http, body | {"stream_options": {"include_usage": True}})
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_usage_in_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(http, {"model": "mock", "messages": user("a b"), "stream_options": options})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 2, 2]
    assert chunks[-1]["choices"] == []


def test_ids_are_the_client_s_where_it_has_some(http: httpx.Client) -> None:
    body = {"model": "mock", "messages": user("a")}
    assert http.post(CHAT, json=body | {"request_id": "abc"}).json()["id"] == "chatcmpl-abc"
    assert http.post(CHAT, json=body, headers={"X-Request-Id": "x-1"}).json()["id"] == "chatcmpl-x-1"
    assert http.post(CHAT, json=body, headers={"X-Request-Id": "a b<"}).json()["id"].startswith("chatcmpl-")
    first, second = (http.post(CHAT, json=body).json() for _ in range(2))
    assert first["id"] != second["id"]
    assert first["system_fingerprint"] == second["system_fingerprint"]


def test_the_conversation_that_the_model_gets(http: httpx.Client) -> None:
    arguments = json.dumps({"city": "Paris"})
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "reasoning": "I must look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
        {"role": "user", "content": say(report=True)},
    ]
    body = {
        "model": "agent",
        "messages": messages,
        "tools": [WEATHER],
        "documents": [{"title": "t", "text": "x"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "verbosity": "high",
        "add_generation_prompt": False,
        "add_special_tokens": True,
    }
    got = json.loads(http.post(CHAT, json=body).json()["choices"][0]["message"]["content"])
    assert got["exclude_input_in_output"] is True
    assert got["add_special_tokens"] is True
    conversation = json.loads(got["messages"])
    assert conversation.pop("messages")[:4] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "I must look.",
            "reasoning_content": "I must look.",
            "tool_calls": [call | {"function": {"name": "weather", "arguments": {"city": "Paris"}}}],
        },
        {"role": "tool", "content": "12 degrees", "tool_call_id": "call_1"},
    ]
    assert conversation == {
        "tools": [WEATHER],
        "documents": [{"title": "t", "text": "x"}],
        "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low", "verbosity": "high"},
        "add_generation_prompt": False,
        "continue_final_message": False,
    }


def test_a_message_is_continued_and_echoed(http: httpx.Client) -> None:
    messages = [*user("hi"), {"role": "assistant", "content": "Once upon"}]
    body = {"model": "mock", "messages": messages, "continue_final_message": True, "echo": True}
    assert ask_both(http, **body)["choices"][0]["message"]["content"] == "Once upon" * 2


@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_reasoning(http: httpx.Client, cut: int) -> None:
    text = say(text="<think>\nLet me <see>.\n</think>\n\nYes.", cut=cut)
    message = ask_both(http, model="agent", messages=user(text))["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == ("Yes.", "Let me <see>.")
    assert message["reasoning_content"] == message["reasoning"]
    without = ask_both(http, model="agent", messages=user(text), include_reasoning=False)["choices"][0]["message"]
    assert (without["content"], without["reasoning"]) == ("Yes.", None)


def test_logprobs_of_what_is_dropped_are_told(http: httpx.Client) -> None:
    text = say(text=f"<think>a</think>{CALL}", cut=3)
    answer = ask_both(http, model="agent", messages=user(text), tools=[WEATHER], logprobs=True)
    tokens = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert "".join(tokens) == f"<think>a</think>{CALL}"


@pytest.mark.parametrize("cut", [1, 5, 1000])
def test_tools_are_called(http: httpx.Client, cut: int) -> None:
    text = say(text=f"<think>Hm.</think>I look.\n{CALL}\n{CALL_NOW}", cut=cut)
    choice = ask_both(http, model="agent", messages=user(text), tools=[WEATHER, NOW])["choices"][0]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"], message["reasoning"]) == ("tool_calls", "I look.", "Hm.")
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert calls == [("weather", {"city": 'Paris "P"'}), ("now", {})]
    one = ask_both(http, model="agent", messages=user(text), tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1


def test_a_call_that_is_cut_off_is_text(http: httpx.Client) -> None:
    text = say(text=CALL, cut=10)
    choice = ask_both(http, model="agent", messages=user(text), tools=[WEATHER], max_tokens=4)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == CALL[:40]
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("given", [{"tool_choice": "none", "tools": [WEATHER]}, {"tools": []}, {}])
def test_without_tools_a_call_is_text(http: httpx.Client, given: dict[str, Any]) -> None:
    choice = ask_both(http, model="agent", messages=user(say(text=CALL)), **given)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    got = json.loads(
        http.post(CHAT, json={"model": "agent", "messages": user(say(report=True)), **given}).json()["choices"][0][
            "message"
        ]["content"]
    )
    assert "tools" not in json.loads(got["messages"])


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_named_function_is_called(http: httpx.Client, cut: int) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    body = {"model": "mock", "tools": [WEATHER, NOW], "tool_choice": choice}
    answer = ask_both(http, **body, messages=user(say(text='{"city": "Paris"}', cut=cut)))["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["message"]["content"] is None
    assert [call["function"] for call in answer["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Paris"}'}
    ]
    assert structure(http, body) == {"json": WEATHER["function"]["parameters"]}  # type: ignore[index]


@pytest.mark.parametrize("cut", [1, 1000])
def test_functions_are_what_tools_were(http: httpx.Client, cut: int) -> None:
    functions = [WEATHER["function"], NOW["function"]]
    text = say(text=f"I look.\n{CALL}\n{CALL_NOW}", cut=cut)
    choice = ask_both(http, model="agent", messages=user(text), functions=functions)["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("function_call", "I look.")
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Paris \\"P\\""}'}
    body = {"model": "mock", "functions": functions, "function_call": {"name": "weather"}}
    named = ask_both(http, **body, messages=user(say(text='{"city": "Paris"}', cut=cut)))["choices"][0]
    assert (named["finish_reason"], named["message"]["content"]) == ("stop", None)
    assert named["message"]["function_call"] == {"name": "weather", "arguments": '{"city": "Paris"}'}


def test_only_allowed_tools_are_called(http: httpx.Client) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    for choice in ({"type": "allowed_tools", "allowed_tools": allowed}, {"type": "allowed_tools", **allowed}):
        body = {"model": "mock", "tools": [WEATHER, NOW], "tool_choice": choice}
        names = structure(http, body)["json"]["items"]["properties"]["name"]["enum"]
        assert names == ["now"]


@pytest.mark.parametrize(("cut", "count"), [(1, 3), (1000, 1)])
def test_tokens_of_reasoning_are_counted(http: httpx.Client, cut: int, count: int) -> None:
    """Never as more than there were at all."""
    body = {"model": "agent", "messages": user(say(text="<think>one two three</think>four", cut=cut))}
    for given in ({}, {"include_reasoning": False}):
        whole = http.post(CHAT, json=body | given).json()["usage"]
        *_, last = events(http, body | given | {"stream_options": {"include_usage": True}})
        assert last["usage"] == whole
        assert whole["completion_tokens_details"] == {"reasoning_tokens": count}
    assert "completion_tokens_details" not in http.post(CHAT, json=body | {"model": "mock"}).json()["usage"]


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_tools_must_be_called(http: httpx.Client, cut: int) -> None:
    text = '[{"name": "weather", "parameters": {"city": "Paris"}}, {"name": "now", "parameters": {}}]'
    body = {"model": "mock", "tools": [WEATHER, NOW], "tool_choice": "required"}
    answer = ask_both(http, **body, messages=user(say(text=text, cut=cut)))["choices"][0]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["weather", "now"]


def test_the_constraint_of_required_calls(http: httpx.Client) -> None:
    body = {"model": "mock", "tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False}
    schema = structure(http, body)["json"]
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    weather, now = schema["items"]["anyOf"]
    assert weather["properties"] == {
        "name": {"type": "string", "enum": ["weather"]},
        "parameters": {"$ref": "#/$defs/tool_0"},
    }
    # What a schema says of its own parts holds where it has moved to.
    assert schema["$defs"]["tool_0"]["properties"] == {"city": {"$ref": "#/$defs/tool_0/$defs/city"}}
    assert now["properties"]["parameters"] == {"type": "object", "properties": {}}


def structure(http: httpx.Client, body: dict[str, Any]) -> Any:
    """The constraint that the model gets."""
    answer = http.post(CHAT, json=body | {"messages": user(say(report=True))}).json()["choices"][0]["message"]
    text = answer["content"] or answer["tool_calls"][0]["function"]["arguments"]
    return json.loads(text)["sampling_parameters"]["structured_outputs"]


def test_the_client_accumulates_tool_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="agent",
        messages=user(say(text=CALL, cut=3)),  # type: ignore[arg-type]
        tools=[WEATHER],  # type: ignore[list-item]
    ) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert json.loads(calls[0].function.arguments) == {"city": 'Paris "P"'}


@pytest.mark.parametrize("cut", [1, 5, 1000])
def test_harmony_has_reasoning_and_calls_in_channels(http: httpx.Client, cut: int) -> None:
    """The model's config names the reasoning alone: the calls are in the same channels."""
    text = (
        "<|channel|>analysis<|message|>rain?<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Bern"}<|call|>'
    )
    choice = ask_both(http, model="oss", messages=user(say(text=text, cut=cut)), tools=[WEATHER])["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == (None, "rain?")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    # The next turn: the template of gpt-oss looks for reasoning before calls in a member of its own.
    messages = [message, {"role": "tool", "tool_call_id": call["id"], "content": "12"}, *user(say(report=True))]
    answer = http.post(CHAT, json={"model": "oss", "messages": messages}).json()
    got = json.loads(answer["choices"][0]["message"]["content"])
    assert json.loads(got["messages"])["messages"][0]["thinking"] == "rain?"
    assert got["sampling_parameters"]["skip_special_tokens"] is False


def test_a_plain_model_has_no_conversations(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"model": "plain", "messages": user("a")})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "model 'plain' takes text and not messages, and has no chat template" in error["message"]
    assert error["param"] == "messages"


def test_the_model_says_which_roles_there_are(http: httpx.Client) -> None:
    """A template may know others than OpenAI's."""
    messages = [{"role": "ipython", "content": "4"}, {"role": "user", "content": say(report=True)}]
    answer = http.post("/v1/chat/completions", json={"model": "mock", "messages": messages})
    report = json.loads(answer.json()["choices"][0]["message"]["content"])
    assert json.loads(report["messages"])["messages"][0] == {"role": "ipython", "content": "4"}
