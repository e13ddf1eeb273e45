"""Completions beyond the plain: kinds of prompts, echo, log-probabilities, the best of several; tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.mock_llm import say

COMPLETIONS = "/v1/completions"


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(COMPLETIONS, json={"model": "mock", **body})
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def streamed(http: httpx.Client, **body: Any) -> dict[int, dict[str, Any]]:
    """The choices that a stream makes up."""
    found: dict[int, dict[str, Any]] = {}
    with http.stream("POST", COMPLETIONS, json={"model": "mock", "stream": True, **body}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for part in (choice for line in lines for choice in json.loads(line)["choices"]):
        choice = found.setdefault(part["index"], part | {"text": "", "logprobs": None})
        choice["text"] += part["text"]
        choice["finish_reason"] = part["finish_reason"]
        if part["logprobs"] is not None:
            old = choice["logprobs"] or {name: [] for name in part["logprobs"]}
            choice["logprobs"] = {name: old[name] + values for name, values in part["logprobs"].items()}
    return found


def tokens_of(http: httpx.Client, text: str) -> list[int]:
    ids: list[int] = http.post("/tokenize", json={"model": "mock", "prompt": text}).json()["tokens"]
    return ids


def test_prompts_of_every_kind(http: httpx.Client) -> None:
    first, second = tokens_of(http, "one two"), tokens_of(http, "three")
    prompts: list[tuple[Any, list[str]]] = [
        ("one two", ["one two"]),
        (["one two", "three"], ["one two", "three"]),
        (first, ["one two"]),
        ([first, second], ["one two", "three"]),
    ]
    for prompt, texts in prompts:
        assert [choice["text"] for choice in complete(http, prompt=prompt)["choices"]] == texts
        assert {index: choice["text"] for index, choice in streamed(http, prompt=prompt).items()} == dict(
            enumerate(texts)
        )


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo(http: httpx.Client, is_streamed: bool) -> None:
    for prompt in ("a b", tokens_of(http, "a b")):
        second: Any = "c" if isinstance(prompt, str) else tokens_of(http, "c")
        body = {"prompt": [prompt, second], "echo": True, "n": 2}
        choices = streamed(http, **body) if is_streamed else dict(enumerate(complete(http, **body)["choices"]))
        assert {index: choice["text"] for index, choice in choices.items()} == {
            0: "a ba b",
            1: "a b1: a b",
            2: "cc",
            3: "c1: c",
        }


@pytest.mark.parametrize("is_streamed", [False, True])
def test_logprobs(http: httpx.Client, is_streamed: bool) -> None:
    body = {"prompt": "ab c", "logprobs": 2}
    choice = streamed(http, **body)[0] if is_streamed else complete(http, **body)["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["ab", " c"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"ab": -0.5, " other0": -1.0}, {" c": -1.5, " other0": -2.0}],
        "text_offset": [0, 2],
    }


@pytest.mark.parametrize("is_streamed", [False, True])
def test_logprobs_of_the_prompt(http: httpx.Client, is_streamed: bool) -> None:
    body = {"prompt": "ab c", "logprobs": 1, "echo": True, "max_tokens": 0}
    choice = streamed(http, **body)[0] if is_streamed else complete(http, **body)["choices"][0]
    assert choice["text"] == "ab c"
    assert choice["logprobs"] == {
        "tokens": ["ab", " c"],
        "token_logprobs": [None, -1.5],
        "top_logprobs": [None, {" c": -1.5}],
        "text_offset": [0, 2],
    }
    both = complete(http, **(body | {"max_tokens": 1}))["choices"][0]
    assert both["text"] == "ab cab"
    assert both["logprobs"]["text_offset"] == [0, 2, 4]


def test_prompt_logprobs(http: httpx.Client) -> None:
    choice = complete(http, prompt="a b", prompt_logprobs=1)["choices"][0]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"][0] is None
    (entry,) = choice["prompt_logprobs"][1].values()
    assert entry == {"logprob": -1.5, "rank": 1, "decoded_token": " b"}


def test_the_best_of_several(http: httpx.Client) -> None:
    # The mock likes long texts, and of equal texts none.
    choices = complete(http, prompt=["a b", "c"], best_of=3, n=2)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert "a b" not in [choice["text"] for choice in choices]
    assert complete(http, prompt=["a b"], best_of=3)["usage"]["completion_tokens"] == 2 + 3 + 3


def test_token_ids(http: httpx.Client) -> None:
    document = complete(http, prompt=["a b", "c"], n=2, return_token_ids=True)
    ids = {text: tokens_of(http, text) for text in ("a b", "1: a b", "c", "1: c")}
    assert [choice["token_ids"] for choice in document["choices"]] == list(ids.values())
    assert [choice["prompt_token_ids"] for choice in document["choices"]] == [ids["a b"]] * 2 + [ids["c"]] * 2
    parts = streamed(http, prompt=["a b", "c"], return_token_ids=True)
    told = {index: choice["prompt_token_ids"] for index, choice in parts.items()}
    assert told == {0: ids["a b"], 1: ids["c"]}


def test_a_model_that_has_the_least(http: httpx.Client) -> None:
    body = {"model": "plain", "prompt": "just words"}
    document = complete(http, **body)
    assert document["choices"][0]["text"] == "just words"
    assert document["choices"][0]["finish_reason"] == "stop"
    assert streamed(http, **body)[0]["finish_reason"] == "stop"
    for wish, param in (({"temperature": 0.5}, "temperature"), ({"prompt": [1, 2]}, "prompt"), ({"logprobs": 1}, None)):
        refused = http.post(COMPLETIONS, json=body | wish)
        assert refused.status_code == 400
        assert "model 'plain' has no input" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] in (param, "logprobs")


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    plain = http.post("/tokenize", json={"model": "mock", "prompt": "a b"}).json()
    assert plain == {"count": 2, "max_model_len": 512, "tokens": plain["tokens"], "token_strs": None}
    messages = [{"role": "user", "content": "a b"}]
    named = http.post("/tokenize", json={"model": "mock", "messages": messages, "return_token_strs": True}).json()
    assert named["token_strs"] == ["a", " b"]
    assert http.post("/detokenize", json={"model": "mock", "tokens": plain["tokens"]}).json() == {"prompt": "a b"}
    assert http.post("/detokenize", json={"model": "mock", "tokens": []}).json() == {"prompt": ""}


def test_embeddings_of_every_kind(http: httpx.Client) -> None:
    ids = tokens_of(http, "one two")
    for given in ("one two", ["one two"], ids, [ids]):
        document = http.post("/v1/embeddings", json={"model": "mock", "input": given}).json()
        assert document["data"] == [{"object": "embedding", "index": 0, "embedding": [0.25, 0.375, 0.5, 0.625]}]
    chat = {"model": "mock", "messages": [{"role": "user", "content": "one two"}]}
    assert http.post("/v1/embeddings", json=chat).json()["data"] == document["data"]
    encoder = http.post("/v1/embeddings", json={"model": "encoder", "input": ["a", "b c"]}).json()
    assert [each["embedding"][0] for each in encoder["data"]] == [0.125, 0.25]
    assert encoder["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_an_answer_may_be_compressed(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={"model": "mock", "prompt": "a"}, headers={"Accept-Encoding": "gzip"})
    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.json()["choices"][0]["text"] == "a"


def test_health_and_version(http: httpx.Client) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = http.request(method, path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert http.get("/version").json()["version"]


def test_a_script_that_says_nothing(http: httpx.Client) -> None:
    assert complete(http, prompt=say(text=""))["choices"][0]["text"] == ""
