"""The same API over the llm backend and a small random checkpoint, beside a mock model."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.gguf_models import write_gguf
from support.llm_models import write_llm
from support.mock_llm import user, write_mock_llm
from support.serving import RunningServer, running_server
from support.tiny_checkpoints import write_checkpoint

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "decide", "parameters": SCHEMA}}
OTHER = {
    "type": "function",
    "function": {"name": "rest", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
FILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
GREEDY = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    write_llm(root, "tiny", checkpoint, dtype="float32", tool_parser="hermes")
    write_llm(root, "coder", coder(checkpoint, tmp_path_factory.mktemp("coder")), dtype="float32")
    config = json.dumps({"method": "suffix", "num_speculative_tokens": 6}).replace('"', '\\"')
    write_llm(root, "guesser", checkpoint, dtype="float32", speculative_config=config)
    (root / "packed" / "1").mkdir(parents=True)
    write_gguf(checkpoint, root / "packed" / "1" / "tiny.F32.gguf")
    write_mock_llm(root, "mock")
    with running_server(root, exit_on_error=True) as running:
        yield running


def coder(checkpoint: Path, directory: Path) -> Path:
    """The same checkpoint with tokens for filling in the middle, in place of its last three."""
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary: dict[str, int] = document["model"]["vocab"]
    last = sorted(vocabulary, key=lambda token: vocabulary[token])[-len(FILL) :]
    for mark, token in zip(FILL, last, strict=True):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        document["added_tokens"].append({"id": vocabulary.pop(token), "content": mark, "special": True, **flags})
    document["model"]["merges"] = [pair for pair in document["model"]["merges"] if "".join(pair) not in last]
    path.write_text(json.dumps(document))
    return directory


@pytest.fixture
def client(served: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{served.http_url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture
async def async_client(served: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{served.http_url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.http_url}", timeout=60) as connected:
        yield connected


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json=GREEDY | body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_models_of_every_kind_side_by_side(client: openai.OpenAI) -> None:
    assert {model.id: bool(model.max_model_len) for model in client.models.list()} == {
        "coder": True,
        "guesser": True,
        "mock": False,
        "packed": True,
        "tiny": True,
    }
    assert client.completions.create(model="mock", prompt="a b").choices[0].text == "a b"


def test_the_middle_is_filled_in_by_the_tokenizer_s_own_tokens(client: openai.OpenAI) -> None:
    def ids(text: str) -> list[int]:
        asked = {"model": "coder", "prompt": text, "add_special_tokens": False}
        return client.post("/../tokenize", body=asked, cast_to=dict[str, Any])["tokens"]  # type: ignore[no-any-return]

    (before,), (after,), (middle,) = map(ids, FILL)
    body: dict[str, Any] = {
        **GREEDY,
        "model": "coder",
        "prompt": "def f(",
        "suffix": "return x",
        "max_tokens": 3,
        "echo": True,
    }
    answer = client.completions.create(**body, extra_body={"return_token_ids": True}).choices[0]
    expected = [before, *ids("def f("), after, *ids("return x"), middle]
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == expected
    assert answer.text.startswith("def f(")
    streamed = list(client.completions.create(**body, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.text
    with pytest.raises(openai.BadRequestError, match="its tokenizer has no tokens for it") as refused:
        client.completions.create(**body | {"model": "tiny"})
    assert (refused.value.param, refused.value.code) == ("suffix", "unsupported_parameter")


def test_streamed_and_whole_are_the_same(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {**GREEDY, "messages": user("hello world"), "max_tokens": 24}
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    last = chunks[-1].usage
    assert last is not None
    assert (last.prompt_tokens, last.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert whole.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("more", [{}, {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.5}, {"stop": ["e", "o"]}])
def test_guessed_tokens_change_neither_text_nor_usage(client: openai.OpenAI, more: dict[str, Any]) -> None:
    body: dict[str, Any] = {**GREEDY, "messages": user("a b a b a b"), "max_tokens": 40, "logprobs": True, **more}
    body["extra_body"] = {"ignore_eos": True}
    plain = client.chat.completions.create(**body)
    for _ in range(2):  # the second time the answer is known
        chunks = list(
            client.chat.completions.create(
                **body | {"model": "guesser"}, stream=True, stream_options={"include_usage": True}
            )
        )
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == plain.choices[0].message.content
        assert choices[-1].finish_reason == plain.choices[0].finish_reason
        tokens = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
        assert plain.choices[0].logprobs is not None
        assert tokens == [entry.token for entry in plain.choices[0].logprobs.content or ()]
        assert chunks[-1].usage is not None
        assert plain.usage is not None
        assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    if not more:
        assert len(chunks) < plain.usage.completion_tokens  # several tokens came at once


def test_a_predicted_answer_is_the_same_and_is_counted(client: openai.OpenAI) -> None:
    """Its text is the same, and the usage says how much of the prediction was right. A busy machine may find that
    drafts do not pay, and rest for some tokens."""
    body: dict[str, Any] = {**GREEDY, "messages": user("a b c"), "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    plain = client.chat.completions.create(**body)
    text = plain.choices[0].message.content
    assert text
    assert plain.usage is not None

    def num_accepted(content: object) -> int:
        body["prediction"] = {"type": "content", "content": content}
        found = client.chat.completions.create(**body)
        chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        assert found.choices[0].message.content == text
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == text
        total = 0
        for usage in (found.usage, chunks[-1].usage):
            assert usage is not None
            assert plain.usage is not None
            assert usage.completion_tokens == plain.usage.completion_tokens
            details = usage.completion_tokens_details
            assert details is not None
            assert details.accepted_prediction_tokens is not None
            assert details.rejected_prediction_tokens is not None
            total += details.accepted_prediction_tokens
        return total

    for content in (text, [{"type": "text", "text": text}]):
        assert any(num_accepted(content) for _ in range(20))
    assert not num_accepted("\u00e9\u00e9\u00e9 " * 20)


def test_a_lone_gguf_file_answers_as_its_checkpoint(client: openai.OpenAI) -> None:
    """Without a config.pbtxt: tokenizer, chat template and ends of texts are in the file."""
    body: dict[str, Any] = {"temperature": 0, "messages": user("hello world"), "max_tokens": 24}
    plain, packed = (
        client.chat.completions.create(model=name, **body, extra_body={"ignore_eos": True})
        for name in ("tiny", "packed")
    )
    assert packed.choices[0].message.content == plain.choices[0].message.content
    assert packed.usage == plain.usage
    # A GGUF file names one token that ends a text; those that end turns are known by what they look like.
    ended = client.chat.completions.create(model="packed", **body).choices[0]
    assert ended.finish_reason == "stop"
    assert (plain.choices[0].message.content or "").startswith(ended.message.content or "?")


async def test_streams_together_are_as_alone(async_client: openai.AsyncOpenAI) -> None:
    async def ask(number: int) -> str:
        stream = await async_client.chat.completions.create(
            model="tiny",
            messages=user(f"hello number {number}"),  # type: ignore[arg-type]
            max_tokens=12,
            temperature=1,
            seed=number,
            stream=True,
        )
        return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

    together = await asyncio.gather(*(ask(number) for number in range(12)))
    assert [await ask(number) for number in range(12)] == together


def test_prompts_and_choices(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "seed": 5, "max_tokens": 6, "temperature": 1}
    prompts = ["the model", "hello"]
    both = client.completions.create(prompt=prompts, n=2, **body)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = [client.completions.create(prompt=prompt, n=2, **body).choices for prompt in prompts]
    assert [choice.text for choice in both.choices] == [choice.text for choices in alone for choice in choices]
    assert both.choices[0].text != both.choices[1].text


def test_logprobs_and_echo(http: httpx.Client) -> None:
    body = GREEDY | {"prompt": "hello world", "max_tokens": 3, "logprobs": 2, "echo": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["token_logprobs"][0] is None
    assert all(value <= 0 for value in found["token_logprobs"][1:])
    assert [len(top) for top in found["top_logprobs"][-3:]] == [2, 2, 2]
    entries = chat(http, messages=user("hi"), max_tokens=3, logprobs=True, top_logprobs=1)["logprobs"]["content"]
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_json_by_a_schema(client: openai.OpenAI, is_streamed: bool) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": user("decide"),
        "temperature": 1,
        "seed": 3,
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    }
    if is_streamed:
        chunks = client.chat.completions.create(**body, stream=True)
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    else:
        text = client.chat.completions.create(**body).choices[0].message.content or ""
    assert sorted(json.loads(text)) == ["kind", "ok"]


def test_tools_are_called_by_constraint(http: httpx.Client) -> None:
    body = {"messages": user("decide"), "tools": [TOOL, OTHER], "temperature": 1, "seed": 1, "max_tokens": 300}
    named = chat(http, **body, tool_choice={"type": "function", "function": {"name": "decide"}})
    (call,) = named["message"]["tool_calls"]
    assert sorted(json.loads(call["function"]["arguments"])) == ["kind", "ok"]
    required = chat(http, **body, tool_choice="required", parallel_tool_calls=False)
    assert required["finish_reason"] == "tool_calls"
    (call,) = required["message"]["tool_calls"]
    assert call["function"]["name"] in ("decide", "rest")
    json.loads(call["function"]["arguments"])


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {**GREEDY, "prompt": "the model of a server answers every request " * 8, "max_tokens": 1}
    client.completions.create(**body)
    usage = client.completions.create(**body).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens
    salted = client.completions.create(**body, extra_body={"cache_salt": "mine"}).usage
    assert salted is not None
    assert salted.prompt_tokens_details is not None
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_embeddings(client: openai.OpenAI) -> None:
    found = client.embeddings.create(model="tiny", input=["hello world", "hello world", "the model"])
    first, second, third = (each.embedding for each in found.data)
    assert first == second != third
    assert len(client.embeddings.create(model="tiny", input="hello", dimensions=4).data[0].embedding) == 4


def test_tokens_there_and_back(http: httpx.Client) -> None:
    document = http.post("/tokenize", json={"model": "tiny", "prompt": "hello wörld", "return_token_strs": True}).json()
    assert document["count"] == len(document["tokens"]) == len(document["token_strs"])
    back = http.post("/detokenize", json={"model": "tiny", "tokens": document["tokens"]}).json()
    assert back == {"prompt": "hello wörld"}
    chat_tokens = http.post("/tokenize", json={"model": "tiny", "messages": user("hello")}).json()
    assert chat_tokens["max_model_len"] == document["max_model_len"]


@pytest.mark.parametrize(
    ("path", "given", "param", "code"),
    [
        ("/v1/completions", {"prompt": "hello " * 3000}, "prompt", "context_length_exceeded"),
        ("/v1/chat/completions", {"messages": user("hello " * 3000)}, "messages", "context_length_exceeded"),
        ("/v1/completions", {"prompt": [5, 100_000]}, "prompt", None),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"100000": 1}}, "logit_bias", None),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "min_tokens", None),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "("}}, None, None),
        (
            "/v1/chat/completions",
            {
                "messages": user("a"),
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
                },
            },
            None,
            None,
        ),
        (
            "/v1/chat/completions",
            {"messages": user("a"), "chat_template_kwargs": {"self": 1}},
            "chat_template_kwargs.self",
            None,
        ),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_the_model_refuses(
    http: httpx.Client, path: str, given: dict[str, Any], param: str | None, code: str | None, is_streamed: bool
) -> None:
    answer = http.post(path, json=GREEDY | given | {"stream": is_streamed})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    if param is not None:
        assert error["param"] == param
