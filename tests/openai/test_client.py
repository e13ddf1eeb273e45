"""OpenAI's own client, sync, async and streaming."""

from __future__ import annotations

import asyncio

import openai
import pytest
from support.mock_llm import say, user


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert sorted(models) == ["agent", "encoder", "mock", "oss", "plain"]
    mock = client.models.retrieve("mock")
    assert mock == models["mock"]
    assert (mock.object, mock.owned_by, mock.max_model_len) == ("model", "modelserver", 512)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.models.retrieve("nobody")
    assert (unknown.value.code, unknown.value.param, unknown.value.type) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="mock", prompt="one two three four", max_tokens=3)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "mock")
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "one two three", "length")
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 3, 7)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.system_fingerprint


def test_a_streamed_completion_of_several_prompts(client: openai.OpenAI) -> None:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    stream = client.completions.create(
        model="mock", prompt=["a b", "c d e"], n=2, stream=True, stream_options={"include_usage": True}
    )
    usage = None
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            assert chunk.usage is None
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {0: "a b", 1: "1: a b", 2: "c d e", 3: "1: c d e"}
    assert set(reasons.values()) == {"stop"}
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 2 + 3 + 3 + 4)


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="mock", messages=user("good morning to you"))
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert (message.role, message.content, message.tool_calls) == ("assistant", "good morning to you", None)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 8


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="mock", messages=user("a b c"), stream=True, stream_options={"include_usage": True}
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["", "a", " b", " c", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 4 + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_many_at_once(async_client: openai.AsyncOpenAI) -> None:
    async def ask(number: int) -> str:
        stream = await async_client.chat.completions.create(
            model="mock", messages=user(f"number {number}"), stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    texts = await asyncio.gather(*(ask(number) for number in range(40)))
    assert texts == [f"number {number}" for number in range(40)]


async def test_an_async_completion(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.completions.create(model="mock", prompt="hello there")
    assert answer.choices[0].text == "hello there"


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings(client: openai.OpenAI, encoding: str) -> None:
    answer = client.embeddings.create(model="mock", input=["one", "one two"], encoding_format=encoding)  # type: ignore[call-overload]
    assert [each.index for each in answer.data] == [0, 1]
    assert answer.usage.prompt_tokens == 3
    if encoding == "float":
        assert answer.data[1].embedding == [0.25, 0.375, 0.5, 0.625]
    plain = client.embeddings.create(model="mock", input="one two", dimensions=2)
    assert plain.data[0].embedding == [0.25, 0.375]


def test_an_error_within_a_stream_is_raised(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="mock", messages=user(say(text="a b c", error=2)), stream=True)
    assert [next(stream).choices[0].delta.content for _ in range(3)] == ["", "a", " b"]
    with pytest.raises(openai.APIError, match="the model broke"):
        next(stream)


def test_an_error_before_a_stream_is_a_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the model broke") as broken:
        client.chat.completions.create(model="mock", messages=user(say(text="a b c", error=0)), stream=True)
    assert broken.value.status_code == 500
    with pytest.raises(openai.BadRequestError, match="too bad"):
        client.completions.create(model="mock", prompt=["fine", say(refuse="too bad")])
