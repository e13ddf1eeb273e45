"""`/api/chat` by Ollama's client: streams of lines, one document, tools, reasoning, structure, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import ollama
import pytest
from support.mock_llm import say


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_an_answer_has_the_text_the_reason_and_the_counts(client: ollama.Client) -> None:
    answer = client.chat("mock", ask("one two three"))
    assert answer.message.role == "assistant"
    assert answer.message.content == "one two three"
    assert answer.model == "mock"
    assert answer.done
    assert answer.done_reason == "stop"
    assert (answer.prompt_eval_count, answer.eval_count) == (3, 3)
    assert answer.total_duration >= answer.load_duration + answer.prompt_eval_duration + answer.eval_duration


def test_a_stream_says_the_same_in_pieces(client: ollama.Client) -> None:
    lines = list(client.chat("mock", ask("one two three"), stream=True))
    assert [line.message.content for line in lines] == ["one", " two", " three", ""]
    assert [line.done for line in lines] == [False, False, False, True]
    assert lines[-1].done_reason == "stop"
    assert (lines[-1].prompt_eval_count, lines[-1].eval_count) == (3, 3)


def test_a_whole_answer_tells_how_long_its_tokens_took(client: ollama.Client) -> None:
    """The model streams, so that the time of the first token is known; clients divide counts by these durations."""
    answer = client.chat("mock", ask(say(report=True)))
    assert json.loads(answer.message.content or "")["stream"] is True
    at_once = client.generate("plain", "one two", raw=True)
    assert at_once.prompt_eval_duration == 0
    assert at_once.eval_duration == at_once.total_duration - at_once.load_duration


def test_lines_are_streamed_unless_the_request_says_otherwise(http: httpx.Client) -> None:
    answer = http.post("/api/chat", json={"model": "mock", "messages": ask("one two")})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["message"]["content"] for line in answer.text.splitlines()] == ["one", " two", ""]


def test_curl_need_not_say_that_a_body_is_json_and_pages_of_other_origins_must(http: httpx.Client) -> None:
    body, kind = (
        json.dumps({"model": "mock", "messages": ask("one")}),
        {"Content-Type": "application/x-www-form-urlencoded"},
    )
    assert http.post("/api/chat", content=body, headers=kind).status_code == 200
    assert http.post("/api/chat", content=body, headers=kind | {"Origin": "http://elsewhere"}).status_code == 415


def test_a_bound_on_tokens_is_the_reason_of_the_end(client: ollama.Client) -> None:
    answer = client.chat("mock", ask("one two three"), options={"num_predict": 2})
    assert (answer.message.content, answer.done_reason) == ("one two", "length")


def test_options_have_the_names_of_ollama(client: ollama.Client) -> None:
    options = {"temperature": 0, "top_k": 0, "seed": 7, "repeat_penalty": 1.5, "stop": "never", "num_ctx": 4096}
    answer = client.chat("mock", ask(say(report=True)), options={**options, "num_predict": -1})
    asked = json.loads(answer.message.content or "")["sampling_parameters"]
    assert asked == {
        "temperature": 0,
        "top_k": -1,
        "seed": 7,
        "repetition_penalty": 1.5,
        "stop": ["never"],
        "max_tokens": None,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_predict": "many"}, 'option "num_predict" must be of type integer'),
        ({"temperature": [1]}, 'option "temperature" must be of type float32'),
        ({"num_ctx": 1.5}, 'option "num_ctx" must be of type integer'),
        ({"stop": [1]}, 'option "stop" must be of type array'),
        ({"use_mmap": 1}, 'option "use_mmap" must be of type boolean'),
        ({"tfs_z": 0.5}, 'option "tfs_z" is not supported'),
    ],
)
def test_wrong_options_are_refused_by_name(client: ollama.Client, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ollama.ResponseError, match=message) as caught:
        client.chat("mock", ask("one"), options=options)
    assert caught.value.status_code == 400


def test_unknown_options_and_neutral_samplers_are_ignored(client: ollama.Client) -> None:
    answer = client.chat("mock", ask("one"), options={"of_tomorrow": 1, "mirostat": 0, "typical_p": 1.0})
    assert answer.message.content == "one"


def test_reasoning_is_told_apart(client: ollama.Client) -> None:
    said = say(text="<think>is it two?</think>\n\nTwo.")
    answer = client.chat("agent", ask(said), think=True)
    assert (answer.message.thinking, answer.message.content) == ("is it two?", "Two.")
    lines = list(client.chat("agent", ask(said), think=True, stream=True))
    assert "".join(line.message.thinking or "" for line in lines) == "is it two?"
    assert "".join(line.message.content or "" for line in lines) == "Two."


def test_thinking_is_an_argument_of_the_template(client: ollama.Client) -> None:
    for think, expected in (
        (False, {"enable_thinking": False}),
        ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ):
        answer = client.chat("agent", ask(say(report=True)), think=think)
        messages = json.loads(json.loads(answer.message.content or "")["messages"])
        assert messages["chat_template_kwargs"] == expected


def test_a_model_without_reasoning_refuses_to_think(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match='"mock" does not support thinking'):
        client.chat("mock", ask("one"), think=True)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_have_their_arguments_as_an_object(client: ollama.Client, stream: bool) -> None:
    said = say(text=f"Let me see. {CALL}{CALL.replace('Oslo', 'Rome')}", cut=3)
    asked = client.chat("agent", ask(said), tools=TOOLS, stream=stream)
    lines = list(asked) if stream else [asked]
    calls = [call for line in lines for call in line.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Oslo"}),
        ("weather", {"city": "Rome"}),
    ]
    assert "".join(line.message.content or "" for line in lines).strip() == "Let me see."
    assert lines[-1].done_reason == "stop"


def test_a_conversation_with_calls_reaches_the_template(client: ollama.Client) -> None:
    messages = [
        {"role": "user", "content": "how is Oslo?"},
        {
            "role": "assistant",
            "thinking": "ask",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "tool_name": "weather", "content": "rain"},
        {"role": "user", "content": say(report=True)},
    ]
    answer = client.chat("agent", messages, tools=TOOLS)
    conversation = json.loads(json.loads(answer.message.content or "")["messages"])
    _, called, told, _ = conversation["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert called["reasoning_content"] == "ask"
    assert (told["role"], told["name"], told["content"]) == ("tool", "weather", "rain")
    assert conversation["tools"] == TOOLS


def test_a_model_without_tools_says_so(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="mock does not support tools") as caught:
        client.chat("mock", ask("one"), tools=TOOLS)
    assert caught.value.status_code == 400


def test_the_form_of_an_answer_is_a_constraint(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form, expected in (("json", {"json_object": True}), (schema, {"json": schema})):
        answer = client.chat("mock", ask(say(report=True)), format=form)  # type: ignore[arg-type]
        asked = json.loads(answer.message.content or "")["sampling_parameters"]
        assert asked["structured_outputs"] == expected


def test_logprobs_are_of_each_token(client: ollama.Client) -> None:
    answer = client.chat("mock", ask("one two"), logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None
    assert [entry.token for entry in answer.logprobs] == ["one", " two"]
    assert all(len(entry.top_logprobs or ()) == 2 for entry in answer.logprobs)


def test_an_empty_conversation_loads_the_model(client: ollama.Client) -> None:
    answer = client.chat("mock", [])
    assert (answer.done, answer.done_reason, answer.message.content) == (True, "load", "")


def test_an_error_after_the_first_line_is_the_last_one(client: ollama.Client) -> None:
    said = []
    with pytest.raises(ollama.ResponseError):  # noqa: PT012 - the stream begins well
        for line in client.chat("mock", ask(say(text="one two three", error=2)), stream=True):
            said.append(line.message.content)  # noqa: PERF401 - what came before the error counts
    assert said == ["one", " two"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"messages": ask("one")}, 400, "model is required"),
        ({"model": "nothing", "messages": ask("one")}, 404, "model 'nothing' not found"),
        ({"model": "encoder", "messages": ask("one")}, 400, "does not generate text"),
        ({"model": "mock", "messages": "one"}, 400, "'messages' must be an array"),
        ({"model": "mock", "messages": [{"content": "one"}]}, 400, "'messages[0].role' is missing"),
        ({"model": "mock", "messages": [{"role": "user", "images": ["aGk="]}]}, 400, "'messages[0].images[0]'"),
        ({"model": "mock", "messages": ask("one"), "format": "xml"}, 400, "invalid format: 'xml'"),
        ({"model": "mock", "messages": ask("one"), "keep_alive": "soon"}, 400, "'keep_alive'"),
        ({"model": "mock", "messages": ask("one"), "top_logprobs": 2}, 400, "'top_logprobs' needs logprobs"),
        ({"model": "mock", "messages": ask("one"), "stream": "yes"}, 400, "'stream' must be true or false"),
    ],
)
def test_wrong_requests_are_refused_in_words(
    http: httpx.Client, body: dict[str, Any], status: int, message: str
) -> None:
    answer = http.post("/api/chat", json=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert message in answer.json()["error"]


def test_a_client_that_leaves_ends_its_generation(client: ollama.Client, http: httpx.Client) -> None:
    stream = client.chat("mock", ask(say(text="one two", endless=True)), stream=True)
    assert next(iter(stream)).message.content
    stream.close()  # type: ignore[attr-defined]  # a generator
    # The model answers others, which it would not with its only instance taken for ever.
    assert client.chat("mock", ask("one")).message.content == "one"
