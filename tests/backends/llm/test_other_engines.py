"""vLLM, SGLang and TensorRT-LLM in the place of our engine, behind our tokenizer, templates, parsers and limits.

The libraries are stand-ins (`support/engine_packages`) in an environment that the models bring. Their networks say the
prompt again, so that an answer shows what they were sent.
"""

from __future__ import annotations

import json
import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.clients import ClientError, HttpClient
from support.llm_models import arrays
from support.serving import RunningServer, running_server
from support.waiting import until_true

PACKAGES = Path(__file__).parents[2] / "support" / "engine_packages"
CHECKPOINT = Path(__file__).parents[3] / "model_repository" / "tiny_chat" / "1"
ENGINES = ("vllm", "sglang", "tensorrt_llm")


def _environment(directory: Path) -> Path:
    venv.create(directory, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in PACKAGES.glob("*.py"):
        shutil.copy(path, directory / "lib" / version / "site-packages")
    return directory


def _write(root: Path, name: str, environment: Path | None, **described: Any) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.json").write_text(json.dumps(described))
    brought = "" if environment is None else f'key: "EXECUTION_ENV_PATH" value {{ string_value: "{environment}" }}'
    (root / name / "config.pbtxt").write_text('backend: "llm"\n' + (f"parameters {{ {brought} }}" if brought else ""))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    environment = _environment(tmp_path_factory.mktemp("environment") / "env")
    adapter = tmp_path_factory.mktemp("adapter")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    usual = {"model": str(CHECKPOINT), "max_model_len": 512, "lora_modules": {"backwards": str(adapter)}}
    for engine in ENGINES:
        _write(root, engine, environment, engine=engine, **usual)
    _write(root, "broken", environment, engine="vllm", model="broken", tokenizer=str(CHECKPOINT))
    _write(root, "missing", None, engine="sglang", model=str(CHECKPOINT))
    _write(root, "unknown", None, engine="llamafile", model=str(CHECKPOINT))
    with running_server(root, strict_readiness=False) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http_url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


@pytest.mark.parametrize("engine", ENGINES)
def test_a_conversation_has_our_template_and_text(client: openai.OpenAI, engine: str) -> None:
    messages: Any = [{"role": "user", "content": "What does str.strip do?"}]
    stream = client.chat.completions.create(
        model=engine,
        messages=messages,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, reasons = "", None, []
    for chunk in stream:
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert "What does str.strip do?" in text  # the rendered prompt, read back
    assert usage is not None
    # At the token that ends the user's turn, which ends texts too.
    assert usage.completion_tokens <= usage.prompt_tokens
    assert reasons == ["stop"]


@pytest.mark.parametrize("engine", ENGINES)
def test_choices_stop_strings_and_probabilities_are_ours(client: openai.OpenAI, engine: str) -> None:
    answer = client.completions.create(
        model=engine, prompt="one two three four", max_tokens=20, n=2, stop=[" three"], logprobs=2, seed=3
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert all(choice.text.endswith("one two") for choice in answer.choices)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert set(logprobs.token_logprobs) == {-0.5}


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_are_models(client: openai.OpenAI, engine: str) -> None:
    plain, backwards = (
        client.completions.create(model=f"{engine}{suffix}", prompt=[5, 6, 7], max_tokens=3, extra_body=extra)
        for suffix, extra in (("", {}), ("", {"lora_name": "backwards"}))
    )
    assert plain.choices[0].text != backwards.choices[0].text
    with pytest.raises(openai.BadRequestError, match="we currently support"):
        client.completions.create(model=engine, prompt=[5], max_tokens=1, extra_body={"lora_name": "other"})


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_has_not_is_refused_by_name(client: openai.OpenAI, engine: str) -> None:
    for field, value, told in (
        ("mirostat", 2, f"'mirostat': the engine {engine}"),
        ("max_tokens", 5000, "512 tokens"),
        ("prompt", [1_000_000], "token id 1000000"),
    ):
        asked: dict[str, Any] = {"model": engine, "prompt": [5], "max_tokens": 4}
        extra = {field: value} if field == "mirostat" else {}
        with pytest.raises(openai.BadRequestError, match=told):
            client.completions.create(**{**asked, **({} if extra else {field: value})}, extra_body=extra)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_leaves_ends_its_text(
    client: openai.OpenAI, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        stream = client.completions.create(model=engine, prompt=[5, 6], max_tokens=500, stream=True)
        next(iter(stream))
        stream.close()
        until_true(lambda: any("abort" in record.getMessage() for record in caplog.records), "abort")


def test_our_metrics_count_it(server: RunningServer, client: openai.OpenAI) -> None:
    client.completions.create(model="vllm", prompt=[5, 6], max_tokens=7)
    page = httpx.get(f"http://{server.metrics_url}/metrics").text
    lines = [line for line in page.splitlines() if 'model_name="vllm"' in line]
    assert any(line.startswith("vllm:generation_tokens_total") and not line.endswith(" 0") for line in lines), lines
    assert any(line.startswith("vllm:request_success_total") and 'reason="length"' in line for line in lines)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("broken", "the engine vllm does not load broken: RuntimeError: no such weights"),
        ("missing", "'sglang' is not installed in the model's environment"),
        ("unknown", "'engine': expected vllm, sglang, tensorrt_llm"),
    ],
)
def test_a_load_that_fails_says_why(server: RunningServer, name: str, told: str) -> None:
    with HttpClient(server) as caller, pytest.raises(ClientError, match=told):
        caller.infer(name, arrays(text_input="a"))


def test_an_engine_that_dies_is_started_again(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="it ran out of memory"):
        client.completions.create(model="vllm", prompt=[13, 13, 13], max_tokens=5)

    def answers() -> bool:
        try:
            return bool(client.completions.create(model="vllm", prompt=[5, 6], max_tokens=1).choices)
        except openai.OpenAIError:
            return False

    until_true(answers, "the next process")
