"""Each event of each family's streams is one that the document describes, with all that a stream can have in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from support.mock_llm import say, user, write_mock_llm
from support.serving import running_server

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
AGENT = say(text=f"<think>rain?</think>Let me see.\n{CALL}", cut=5)
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "x"}}\n</tool_call>'
# What is asked of each route, beside a plain text: the rest of what its events can have.
ASKED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": user("one two"), "logprobs": True, "top_logprobs": 1, "n": 2, "return_token_ids": True},
        {"messages": user("one two"), "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"model": "agent", "messages": user(AGENT), "tools": CHAT_TOOLS},
        {"model": "agent", "messages": user(say(text=CALL)), "functions": [FUNCTION]},
        {"model": "agent", "messages": user(AGENT), "tools": CHAT_TOOLS, "tool_choice": "required"},
    ],
    "/v1/completions": [
        {"prompt": ["one two", "three"], "logprobs": 1, "echo": True, "n": 2},
        {"prompt": "one", "suffix": "two", "stream_options": {"include_usage": True}, "return_token_ids": True},
    ],
    "/v1/responses": [
        {"input": "one two", "top_logprobs": 1},
        {"model": "agent", "input": AGENT, "tools": [{"type": "function", **FUNCTION}]},
        {"model": "agent", "input": say(text=PATCH), "tools": [{"type": "custom", "name": "patch"}]},
        {"input": "one two three", "max_output_tokens": 1},
        {"input": say(text="one two", error=1)},
    ],
    "/v1/messages": [
        {"messages": user("one two"), "max_tokens": 1},
        {
            "model": "agent",
            "messages": user(AGENT),
            "max_tokens": 200,
            "thinking": {"type": "adaptive"},
            "tools": [{"name": "weather", "input_schema": FUNCTION["parameters"]}],
        },
        {"messages": user(say(text="one two", error=1)), "max_tokens": 9},
    ],
    "/api/chat": [
        {"messages": user("one two"), "logprobs": True, "top_logprobs": 1},
        {"model": "agent", "messages": user(AGENT), "tools": CHAT_TOOLS, "think": True},
    ],
    "/api/generate": [{"prompt": "one two", "logprobs": True}],
    "/generate_stream": [{"inputs": "one two", "parameters": {"details": True, "top_n_tokens": 2}}],
    "/completion": [{"prompt": "one two", "n_probs": 2, "return_tokens": True, "timings_per_token": True}],
    "/completions": [{"prompt": ["one", "two"]}],
    "/infill": [{"input_prefix": "one", "input_suffix": "two"}],
}
# Routes whose events tell the progress of work on the model store, and those of sound and pictures, whose models are
# those of tests/openai/test_audio.py and test_speech_and_images.py.
_OTHERS = {
    "/api/pull",
    "/api/push",
    "/api/create",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root = tmp_path_factory.mktemp("streaming")
    write_mock_llm(root, "mock")
    write_mock_llm(root, "agent", parameters={"tool_parser": "hermes", "reasoning_parser": "qwen3"})
    with running_server(root) as running, httpx.Client(base_url=f"http://{running.http_url}", timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def described(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The content of a successful answer, by the path of each route that streams."""
    found = {}
    for path, item in document["paths"].items():
        content = item.get("post", {}).get("responses", {}).get("200", {}).get("content", {})
        if not path.startswith("/v2") and any("x-event" in kind for kind in content.values()):
            found[path] = content
    return found


def test_every_route_that_streams_is_asked(document: dict[str, Any]) -> None:
    assert described(document).keys() - _OTHERS == ASKED.keys()


@pytest.mark.parametrize("path", ASKED)
def test_events_are_as_described(http: httpx.Client, document: dict[str, Any], path: str) -> None:
    content = described(document)[path]
    event = next(kind["x-event"] for kind in content.values() if "x-event" in kind)
    schema = {**event, "components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert not validator.is_valid({})
    for body in ASKED[path]:
        answer = http.post(path, json={"model": "mock", "stream": True, **body})
        assert answer.status_code == 200, answer.text
        kind = answer.headers["content-type"].partition(";")[0]
        assert "x-event" in content[kind]
        events = list(_events(answer.text))
        assert events
        for each in events:
            problem = jsonschema.exceptions.best_match(validator.iter_errors(each))
            assert problem is None, f"{path}: {problem.message} in {json.dumps(each)}"


def _events(text: str) -> Iterator[Any]:
    """Of server-sent events, or of lines of JSON."""
    for line in text.splitlines():
        data = line.removeprefix("data:").strip()
        if line.startswith(("data:", "{")) and data != "[DONE]":
            yield json.loads(data)
