"""Pictures through the APIs of language models, over the llm backend and a small random checkpoint that sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest
from support.llm_models import write_llm
from support.serving import RunningServer, running_server
from support.tiny_checkpoints import write_checkpoint
from support.tiny_pictures import (
    conversation,
    data_url,
    draw_picture,
    prompt_text,
    reference_answer,
    write_picture_checkpoint,
)
from tokenizers import Tokenizer

FIRST, SECOND = draw_picture(0), draw_picture(1, (64, 50))
GREEDY: dict[str, Any] = {"model": "seeing", "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_picture_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llava", "llava")


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_llm(root, "seeing", checkpoint, dtype="float32", limit_mm_per_prompt=3, max_image_pixels=10_000)
    write_llm(root, "blind", write_checkpoint(tmp_path_factory.mktemp("blind")), dtype="float32")
    with running_server(root, exit_on_error=True, allowed_media_domains=("localhost",)) as running:
        yield running


@pytest.fixture
def client(served: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{served.http_url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def expected(checkpoint: Path, text: str, *pictures: bytes) -> tuple[int, str]:
    """The number of tokens of the prompt, and the answer's text."""
    prompt, tokens = reference_answer(checkpoint, "llava", prompt_text("llava", text, len(pictures)), pictures, 8)
    return len(prompt), Tokenizer.from_file(str(checkpoint / "tokenizer.json")).decode(tokens)


@pytest.mark.parametrize("pictures", [(FIRST,), (SECOND,), (FIRST, SECOND)], ids=["first", "second", "both"])
def test_a_chat_about_pictures_equals_transformers(
    client: openai.OpenAI, checkpoint: Path, pictures: tuple[bytes, ...]
) -> None:
    length, text = expected(checkpoint, "hello", *pictures)
    answer = client.chat.completions.create(messages=conversation("hello", *pictures), **GREEDY)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == length
    streamed = client.chat.completions.create(messages=conversation("hello", *pictures), stream=True, **GREEDY)  # type: ignore[arg-type]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == text


def test_a_response_about_a_picture(client: openai.OpenAI, checkpoint: Path) -> None:
    content = [{"type": "input_image", "image_url": data_url(FIRST)}, {"type": "input_text", "text": "hello"}]
    answer = client.responses.create(
        model="seeing",
        input=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
        temperature=0,
        max_output_tokens=8,
        extra_body={"ignore_eos": True},
    )
    assert answer.output_text == expected(checkpoint, "hello", FIRST)[1]


def test_tokens_of_pictures_are_counted(served: RunningServer, checkpoint: Path) -> None:
    body = {"model": "seeing", "messages": conversation("hello", FIRST)}
    answer = httpx.post(f"http://{served.http_url}/tokenize", json=body)
    assert answer.json()["count"] == expected(checkpoint, "hello", FIRST)[0]


def test_a_message_of_anthropics_api(served: RunningServer, checkpoint: Path) -> None:
    import anthropic

    length, text = expected(checkpoint, "hello", FIRST)
    source: dict[str, Any] = {"type": "base64", "media_type": "image/png", "data": data_url(FIRST).partition(",")[2]}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "hello"}]
    messages: Any = [{"role": "user", "content": content}]
    with anthropic.Anthropic(base_url=f"http://{served.http_url}", api_key="none", max_retries=0) as client:
        options: Any = {"model": "seeing", "messages": messages}
        answer = client.messages.create(max_tokens=8, extra_body={"temperature": 0}, **options)
        assert answer.usage.input_tokens == length
        assert text.startswith(answer.content[0].text)  # type: ignore[union-attr]
        assert client.messages.count_tokens(**options).input_tokens == length
        source |= {"type": "url", "url": "https://example.com/a.png"}
        with pytest.raises(anthropic.BadRequestError, match="not fetched"):
            client.messages.create(max_tokens=8, **options)


def test_pictures_of_ollamas_api(served: RunningServer, checkpoint: Path) -> None:
    text = expected(checkpoint, "hello", FIRST, SECOND)[1]
    options = {"temperature": 0, "num_predict": 8}
    with ollama.Client(f"http://{served.http_url}") as client:
        message = {"role": "user", "content": "hello", "images": [FIRST, SECOND]}
        answer = client.chat("seeing", messages=[message], options=options)
        assert answer.message.content
        assert text.startswith(answer.message.content)
        generated = client.generate("seeing", "hello", images=[FIRST, SECOND], options=options)
        assert generated.response == answer.message.content
        assert generated.prompt_eval_count == expected(checkpoint, "hello", FIRST, SECOND)[0]
        assert "vision" in (client.show("seeing").capabilities or ())
        assert "vision" not in (client.show("blind").capabilities or ())
        with pytest.raises(ollama.ResponseError, match="do not go with raw"):
            client.generate("seeing", "hello", images=[FIRST], raw=True)


def test_pictures_of_tgis_api(served: RunningServer, checkpoint: Path) -> None:
    prompt = prompt_text("llava", "hello", 2)
    markdown = prompt.replace("<image>", f"![]({data_url(FIRST)})", 1).replace("<image>", f"![]({data_url(SECOND)})")
    body = {"inputs": markdown, "parameters": {"max_new_tokens": 8}, "add_special_tokens": False}
    url = f"http://{served.http_url}/generate"
    answer = httpx.post(url, json={**body, "model": "seeing"}, timeout=30)
    text = answer.json()["generated_text"]
    assert text
    assert expected(checkpoint, "hello", FIRST, SECOND)[1].startswith(text)
    blind = httpx.post(url, json={"model": "blind", "inputs": "![](https://example.com/a.png)"}, timeout=30)
    assert blind.status_code == 200, "to a model that sees none it is a text"
    body["parameters"]["truncate"] = 5
    refused = httpx.post(url, json={**body, "model": "seeing"}, timeout=30)
    assert (refused.status_code, "prompt with pictures" in refused.json()["error"]) == (422, True)


def test_pictures_of_llamacpps_api(served: RunningServer, checkpoint: Path) -> None:
    text = prompt_text("llava", "hello").replace("<image>", "<__media__>")
    prompt = {"prompt_string": text, "multimodal_data": [data_url(FIRST).partition(",")[2]]}
    body = {"model": "seeing", "prompt": prompt, "n_predict": 8, "temperature": 0, "ignore_eos": True}
    url = f"http://{served.http_url}"
    answer = httpx.post(f"{url}/completion", json=body, timeout=30).json()
    assert answer["content"] == expected(checkpoint, "hello", FIRST)[1]
    assert httpx.get(f"{url}/props?model=seeing").json()["modalities"]["vision"] is True
    for model, changed, message in (
        ("blind", {}, "'prompt.multimodal_data[0]': the model 'blind' takes text only"),
        ("seeing", {"prompt_string": "hello"}, "the prompt has 0 places for them (<image> or <__media__>)"),
    ):
        refused = httpx.post(f"{url}/completion", json={**body, "model": model, "prompt": prompt | changed})
        assert (refused.status_code, message in refused.json()["error"]["message"]) == (400, True), refused.text


@pytest.mark.parametrize(
    ("model", "part", "param", "message"),
    [
        ("blind", {"url": data_url(FIRST)}, "messages[0].content[0].image_url.url", "takes text only, and no pictures"),
        ("seeing", {"url": "https://example.com/a.png"}, "messages[0].content[0].image_url.url", "not fetched"),
        ("seeing", {"url": "http://localhost/a.png"}, "messages[0].content[0].image_url.url", "could not be fetched"),
        ("seeing", {"url": "file:///etc/passwd"}, "messages[0].content[0].image_url.url", "not fetched"),
        ("seeing", {}, "messages[0].content[0].image_url.url", "is missing"),
        ("seeing", {"url": "aGVsbG8="}, "messages", "cannot be read as a picture"),
        ("seeing", {"url": data_url(draw_picture(3, (101, 100)))}, "messages", "at most 10000 are decoded"),
    ],
)
def test_what_is_no_picture(served: RunningServer, model: str, part: dict[str, Any], param: str, message: str) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": part}]}]
    answer = httpx.post(
        f"http://{served.http_url}/v1/chat/completions", json={"model": model, "messages": messages}, timeout=30
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


def test_too_many_pictures(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="has 4 pictures; this model takes at most 3"):
        client.chat.completions.create(messages=conversation("hello", *[FIRST] * 4), **GREEDY)  # type: ignore[arg-type]


def test_the_image_tensor_of_tritons_vllm_backend(served: RunningServer, checkpoint: Path) -> None:
    body = {
        "text_input": prompt_text("llava", "hello"),
        "image": data_url(FIRST).partition(",")[2],
        "add_special_tokens": False,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps({"temperature": 0, "max_tokens": 8, "ignore_eos": True}),
    }
    answer = httpx.post(f"http://{served.http_url}/v2/models/seeing/generate", json=body, timeout=30)
    assert answer.json()["text_output"] == expected(checkpoint, "hello", FIRST)[1]
    named = httpx.get(f"http://{served.http_url}/v2/models/blind").json()["inputs"]
    assert "image" not in {spec["name"] for spec in named}
