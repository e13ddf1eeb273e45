"""The requests that open-webui and Continue send, from their sources, and what they read of the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import httpx
import pytest

Document = dict[str, Any]

CHAT_END = (
    "done",
    "done_reason",
    "eval_count",
    "prompt_eval_count",
    "total_duration",
    "eval_duration",
    "load_duration",
)
USER = {"role": "user", "content": "one two"}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]}
KEEP = {"keep_alive": 1800}
TITLE = [
    {"role": "user", "content": "### Task:\nGive a title of 3 words as JSON.\n<chat_history>\none\n</chat_history>"}
]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One request. Each dotted path of `reads` must be in the answer, or in the last document of a stream.

    `lines` are what a client joins from the documents of a stream: the dotted path of its text.
    """

    who: str
    path: str
    body: Mapping[str, Any] | None = None
    method: str = "POST"
    reads: Sequence[str] = ()
    lines: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


WEBUI, CONTINUE = "open-webui", "continue"
WEBUI_HEADERS = {"X-OpenWebUI-User-Name": "A", "X-OpenWebUI-User-Role": "admin", "X-OpenWebUI-Chat-Id": "c"}
MODEL_FIELDS = [f"models.0.{name}" for name in ("name", "model", "size", "digest", "modified_at", "details.family")]
CALLS = (
    # open-webui, of a server of Ollama's API.
    Call(who=WEBUI, method="GET", path="/api/version", reads=["version"], headers={"Authorization": "Bearer none"}),
    Call(who=WEBUI, method="GET", path="/api/tags", reads=[*MODEL_FIELDS, "models.0.details.parameter_size"]),
    Call(who=WEBUI, method="GET", path="/api/ps", reads=["models.0.name", "models.0.expires_at"]),
    Call(who=WEBUI, path="/api/show", body={"model": "mock:latest", "name": "mock:latest"}, reads=["details.family"]),
    Call(
        who=WEBUI,
        path="/api/chat",
        headers=WEBUI_HEADERS,
        body={
            "model": "mock:latest",
            "messages": [{"role": "system", "content": "Be brief."}, USER],
            "stream": True,
            "options": {"temperature": 0.8, "num_ctx": 2048, "repeat_last_n": 64, "seed": 0, "num_predict": 128},
            "keep_alive": "5m",
        },
        reads=CHAT_END,
        lines="message.content",
    ),
    Call(
        who=WEBUI,
        path="/api/chat",
        body={"model": "mock:latest", "messages": TITLE, "stream": False, "options": {"num_predict": 1000}},
        reads=["message.content", *CHAT_END],
    ),
    Call(
        who=WEBUI,
        path="/api/chat",
        body={
            "model": "agent:latest",
            "messages": [USER, CALL, {"role": "tool", "content": "seen", "tool_call_id": "x"}],
            "tools": [TOOL],
            "think": False,
        },
        reads=CHAT_END,
        lines="message.content",
    ),
    Call(who=WEBUI, path="/api/generate", body={"model": "mock:latest", "prompt": "one"}, lines="response"),
    Call(who=WEBUI, path="/api/embed", body={"model": "encoder:latest", "input": ["a", "b"]}, reads=["embeddings.1.0"]),
    Call(who=WEBUI, path="/api/embeddings", body={"model": "encoder:latest", "prompt": "a"}, reads=["embedding.0"]),
    Call(
        who=WEBUI,
        path="/api/embed",
        body={"model": "encoder", "input": ["a"], "truncate": True},
        headers={"X-OpenWebUI-User-Id": "1"},
        reads=["embeddings.0.0"],
    ),
    # open-webui, of a server of OpenAI's API.
    Call(who=WEBUI, method="GET", path="/v1/models", reads=["data.0.id", "object"], headers=WEBUI_HEADERS),
    Call(
        who=WEBUI,
        path="/v1/chat/completions",
        body={
            "model": "mock",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "one two"}]}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        headers=WEBUI_HEADERS,
        reads=["usage.prompt_tokens"],
        lines="choices.0.delta.content",
    ),
    Call(
        who=WEBUI,
        path="/v1/chat/completions",
        body={"model": "mock", "messages": TITLE, "stream": False, "max_completion_tokens": 1000},
        reads=["choices.0.message.content", "usage.total_tokens"],
    ),
    Call(who=WEBUI, path="/v1/embeddings", body={"model": "encoder", "input": ["a"]}, reads=["data.0.embedding.0"]),
    # Continue, by its provider for Ollama.
    Call(who=CONTINUE, path="/api/show", body={"name": "mock"}, reads=["template", "parameters", "capabilities"]),
    Call(who=CONTINUE, method="GET", path="/api/tags", reads=["models.0.name"]),
    Call(
        who=CONTINUE,
        path="/api/chat",
        body={
            "model": "mock",
            "messages": [USER, {"role": "assistant", "content": "one two"}, USER],
            "options": {"num_predict": 64, "num_ctx": 8192, "stop": ["END"], "use_mmap": True, "num_thread": 2},
            "stream": True,
            **KEEP,
        },
        reads=CHAT_END,
        lines="message.content",
    ),
    Call(
        who=CONTINUE,
        path="/api/chat",
        body={"model": "agent", "messages": [USER], "tools": [TOOL], "stream": False, "options": {}, **KEEP},
        reads=["message.role", "message.content"],
    ),
    Call(
        who=CONTINUE,
        path="/api/generate",
        body={"model": "mock", "prompt": "one", "raw": True, "stream": True, "options": {"num_predict": 8}, **KEEP},
        reads=["done"],
        lines="response",
    ),
    Call(who=CONTINUE, path="/api/embed", body={"model": "encoder", "input": ["a", "b"]}, reads=["embeddings.1.0"]),
    # Continue, by its provider for OpenAI.
    Call(
        who=CONTINUE,
        path="/v1/chat/completions",
        body={
            "model": "agent",
            "messages": [USER],
            "tools": [TOOL],
            "max_tokens": 64,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        headers={"x-api-key": "", "Authorization": "Bearer none"},
        reads=["usage.total_tokens"],
        lines="choices.0.delta.content",
    ),
    Call(
        who=CONTINUE,
        path="/v1/completions",
        body={"model": "mock", "prompt": "one", "max_tokens": 8, "stream": True, "stop": ["END"]},
        lines="choices.0.text",
    ),
    Call(who=CONTINUE, path="/v1/embeddings", body={"model": "encoder", "input": ["a"]}, reads=["data.0.embedding.0"]),
    Call(
        who=CONTINUE,
        path="/v1/rerank",
        body={"model": "encoder", "query": "a", "documents": ["a", "b"]},
        reads=["results.0.index", "results.1.relevance_score"],
    ),
)


def found(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document[int(name)] if isinstance(document, list) else document[name]
    return document


def documents(text: str) -> list[Document]:
    """Those of a stream: a line each, or an event each."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("call", CALLS, ids=[f"{call.who}-{call.path}-{n}" for n, call in enumerate(CALLS)])
def test_a_request_is_answered_as_its_client_reads_it(http: httpx.Client, call: Call) -> None:
    headers = {"Content-Type": "application/json", **call.headers}
    answer = http.request(call.method, call.path, json=call.body, headers=headers)
    assert answer.status_code == 200, answer.text
    parts = documents(answer.text) if call.lines else [answer.json()]
    for path in call.reads:
        assert found(parts[-1], path) is not None, path
    if call.lines:
        texts = []
        for part in parts:
            try:
                texts.append(found(part, call.lines) or "")
            except (LookupError, TypeError):  # a document of another kind, such as the usage
                continue
        assert "one" in "".join(texts) or "seen" in "".join(texts)


def test_open_webui_reads_when_models_leave_and_unloads_them(http: httpx.Client) -> None:
    running = http.get("/api/ps").json()["models"]
    assert all(datetime.fromisoformat(model["expires_at"]).tzinfo is not None for model in running)
    body = {"model": "mock:latest", "keep_alive": 0, "prompt": ""}
    refused = http.post("/api/generate", json=body)
    assert "error" in refused.json()  # the model is not one on demand: it says so


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/pull", {"name": "a", "model": "a", "insecure": True}),
        ("POST", "/api/create", {"model": "a", "modelfile": "FROM b"}),
        ("POST", "/api/copy", {"source": "a", "destination": "b"}),
        ("DELETE", "/api/delete", {"name": "a", "model": "a"}),
        ("POST", "/api/chat", {"model": "absent:latest", "messages": [USER]}),
    ],
)
def test_a_refusal_is_one_text_that_both_show(http: httpx.Client, method: str, path: str, body: Document) -> None:
    answer = http.request(method, path, json=body)
    assert answer.status_code in (400, 404)
    assert isinstance(answer.json()["error"], str)
