"""Prompts and the requests that carry them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelserver.bench.llm.options import Length, LlmOptions, PromptOptions
from modelserver.bench.llm.session import Prompt, encode_prompts, make_prompts
from modelserver.bench.work import EndpointType
from modelserver.client.address import Address
from modelserver.errors import InvalidArgumentError


def test_made_up_prompts_have_about_the_length_and_repeat_by_seed() -> None:
    options = PromptOptions(num_prompts=200, input_tokens=Length(50, 10), output_tokens=Length(20))
    prompts = make_prompts(options)
    lengths = [len(prompt.text.split()) for prompt in prompts]
    assert 47 < sum(lengths) / len(lengths) < 53
    assert len(set(lengths)) > 10
    assert {prompt.max_tokens for prompt in prompts} == {20}
    assert make_prompts(options) == prompts


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "one", "max_tokens": 5}\n\n"two"\n{"text_input": "three"}\n'
        '{"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "four"}]}\n'
    )
    prompts = make_prompts(PromptOptions(file=path, output_tokens=None))
    assert [(prompt.text, prompt.max_tokens) for prompt in prompts] == [
        ("one", 5),
        ("two", None),
        ("three", None),
        ("be\nfour", None),
    ]
    assert len(prompts[3].messages) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b'"\xff"', "line 1: not JSON"),
        (b'{"x": 1}', "line 1: expected"),
        (b'\n"one"\n[1]', "line 3: expected"),
        (b'{"prompt": 1}', "line 1: expected"),
        (b'{"messages": []}', "line 1: expected"),
        (b'{"messages": ["hello"]}', "line 1: expected"),
        (b'{"prompt": "one", "max_tokens": "many"}', "'max_tokens' must be a whole number"),
        (b'{"prompt": "one", "max_tokens": 0}', "'max_tokens' must be a whole number"),
        (b"", "no prompts"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=message):
        make_prompts(PromptOptions(file=path))


def body(kind: EndpointType, prompt: Prompt, **more: Any) -> dict[str, Any]:
    options = LlmOptions("llama", Address("h", 1), endpoint_type=kind, **more)
    (request,) = encode_prompts(options, [prompt], "/p")
    head, _, raw = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /p HTTP/1.1\r\nHost: h:1\r\n")
    assert f"Content-Length: {len(raw)}".encode() in head
    document: dict[str, Any] = json.loads(raw)
    return document


def test_bodies() -> None:
    prompt = Prompt("hi", (), 9)
    assert body(EndpointType.CHAT, prompt) == {
        "model": "llama",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
    }
    plain = body(EndpointType.COMPLETIONS, prompt, is_streaming=False, extra={"ignore_eos": True})
    assert plain == {"model": "llama", "prompt": "hi", "stream": False, "max_tokens": 9, "ignore_eos": True}
    generate = body(EndpointType.GENERATE, Prompt("hi"))
    assert generate == {"text_input": "hi", "stream": True}
