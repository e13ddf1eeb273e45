"""`/api/generate` and the embeddings by Ollama's client."""

from __future__ import annotations

import json

import httpx
import ollama
import pytest
from support.mock_llm import say


def test_a_prompt_is_the_message_of_a_conversation(client: ollama.Client) -> None:
    answer = client.generate("mock", say(report=True), system="be brief")
    conversation = json.loads(json.loads(answer.response)["messages"])
    assert [message["role"] for message in conversation["messages"]] == ["system", "user"]


def test_a_raw_prompt_is_the_text_itself(client: ollama.Client) -> None:
    answer = client.generate("mock", say(report=True), raw=True)
    assert "messages" not in json.loads(answer.response)


def test_a_stream_ends_with_the_counts_and_the_context(client: ollama.Client) -> None:
    lines = list(client.generate("mock", "one two", stream=True))
    assert [line.response for line in lines] == ["one", " two", ""]
    assert (lines[-1].done_reason, lines[-1].prompt_eval_count, lines[-1].eval_count) == ("stop", 2, 2)
    assert lines[-1].context is not None
    assert len(lines[-1].context) == 4


def test_the_context_continues_the_conversation(client: ollama.Client) -> None:
    first = client.generate("mock", "one two")
    assert first.context is not None
    second = client.generate("mock", " three", context=first.context)
    assert second.response == "one twoone two three"
    assert second.context is not None
    assert second.context[: len(first.context)] == first.context


def test_a_model_that_tells_no_tokens_answers_without_context(client: ollama.Client) -> None:
    assert client.generate("plain", "one two", raw=True).context is None


def test_an_empty_prompt_loads_the_model(client: ollama.Client) -> None:
    answer = client.generate("mock")
    assert (answer.response, answer.done, answer.done_reason) == ("", True, "load")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "one", "template": "{{ .Prompt"}, "the model's template, line 1, column 1: unclosed action"),
        ({"prompt": "one", "template": "{{ .Prompt }}", "context": [1]}, "'context' does not go with a template"),
        ({"prompt": "one", "raw": True, "system": "brief"}, "raw mode does not support template, system, or context"),
        ({"model": "plain", "prompt": "one", "suffix": "two"}, "'suffix' is not supported"),
        ({"prompt": "one", "images": ["aGk="]}, "'images[0]': the model 'mock' takes text only"),
        ({"prompt": ["one"]}, "'prompt' must be a string"),
    ],
)
def test_wrong_requests_are_refused_in_words(http: httpx.Client, body: dict[str, object], message: str) -> None:
    answer = http.post("/api/generate", json={"model": "mock", **body})
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_embeddings_of_one_text_and_of_several(client: ollama.Client) -> None:
    assert client.embed("encoder", "one two").embeddings == [[0.25, 0.375, 0.5, 0.625]]
    several = client.embed("encoder", ["one", "one two"], dimensions=2)
    assert several.embeddings == [[0.125, 0.25], [0.25, 0.375]]
    assert several.prompt_eval_count == 3
    assert list(client.embeddings("encoder", "one two").embedding) == [0.25, 0.375, 0.5, 0.625]


@pytest.mark.parametrize("body", [{"model": "encoder"}, {"model": "encoder", "input": 7}, {"input": "one"}])
def test_wrong_inputs_of_embeddings_are_refused(http: httpx.Client, body: dict[str, object]) -> None:
    answer = http.post("/api/embed", json=body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]


def test_a_text_has_no_bound_unless_the_request_says_one(client: ollama.Client) -> None:
    def bound(**options: int) -> int | None:
        answer = client.generate("mock", say(report=True), raw=True, options=options)
        found: int | None = json.loads(answer.response)["sampling_parameters"]["max_tokens"]
        return found

    assert bound() is None
    assert bound(num_predict=-1) is None
    assert bound(num_predict=500) == 500
