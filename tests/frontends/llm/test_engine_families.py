"""TGI's and llama.cpp's calls of the llm backend and a small random checkpoint: tokens, samplers and constraints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.events import events_of
from support.layouts import free_port
from support.llm_models import write_llm
from support.serving import running_server
from support.tiny_checkpoints import write_checkpoint

PROMPT = "the quick brown fox"
SAMPLERS: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.5},
    "top_n_sigma": {"top_n_sigma": 1.0},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.001},
    "dynamic_temperature": {"dynatemp_range": 0.9, "temperature": 1.0},
    "mirostat": {"mirostat": 1, "mirostat_tau": 2.0},
    "mirostat_2": {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": []},
}


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, httpx.Client]]:
    """A client of each family's own port, and of the shared one."""
    root = tmp_path_factory.mktemp("served")
    write_llm(root, "tiny", write_checkpoint(tmp_path_factory.mktemp("checkpoint")), dtype="float32")
    tgi, llamacpp = free_port(), free_port()
    with running_server(root, exit_on_error=True, api=(f"tgi={tgi}", f"llamacpp={llamacpp}")) as running:
        urls = {"tgi": f"127.0.0.1:{tgi}", "llamacpp": f"127.0.0.1:{llamacpp}", "openai": running.http_url}
        clients = {name: httpx.Client(base_url=f"http://{url}", timeout=60) for name, url in urls.items()}
        yield clients
        for client in clients.values():
            client.close()


def test_the_families_say_the_same_text(ports: dict[str, httpx.Client]) -> None:
    generated = ports["tgi"].post("/generate", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 8}})
    completed = ports["llamacpp"].post("/completion", json={"prompt": PROMPT, "n_predict": 8, "temperature": 0})
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    expected = ports["openai"].post("/v1/completions", json=asked).json()["choices"][0]["text"]
    assert (generated.json()["generated_text"], completed.json()["content"]) == (expected, expected)


def test_streamed_tokens_add_up_to_the_text(ports: dict[str, httpx.Client]) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "details": True, "top_n_tokens": 2}}
    *parts, last = events_of(ports["tgi"].post("/generate_stream", json=body).text)
    texts = [event["token"]["text"] for event in (*parts, last) if not event["token"]["special"]]
    assert "".join(texts) == last["generated_text"]
    assert last["details"]["generated_tokens"] == len(parts) + 1
    assert all(event["token"]["logprob"] < 0 and len(event["top_tokens"]) == 2 for event in parts)
    *parts, last = events_of(
        ports["llamacpp"].post("/completion", json={"prompt": PROMPT, "n_predict": 8, "stream": True}).text
    )
    assert sum(len(part["tokens"]) for part in parts) == last["tokens_predicted"] == 8


def test_tokens_of_a_constrained_text_are_the_text(ports: dict[str, httpx.Client]) -> None:
    asked = {"grammar": {"type": "regex", "value": "ab"}, "details": True}
    details = ports["tgi"].post("/generate", json={"inputs": PROMPT, "parameters": asked}).json()["details"]
    assert details["finish_reason"] == "eos_token"
    assert "".join(token["text"] for token in details["tokens"] if not token["special"]) == "ab"
    events = events_of(ports["tgi"].post("/generate_stream", json={"inputs": PROMPT, "parameters": asked}).text)
    assert "".join(event["token"]["text"] for event in events if not event["token"]["special"]) == "ab"


def test_tokens_tell_their_bytes_and_places(ports: dict[str, httpx.Client]) -> None:
    text = "día ünïcode"
    placed = ports["tgi"].post("/tokenize", json={"inputs": text, "add_special_tokens": False}).json()
    assert "".join(token["text"] for token in placed) == text
    assert placed[-1]["stop"] == len(text)
    pieces = ports["llamacpp"].post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    raw = [each["piece"].encode() if isinstance(each["piece"], str) else bytes(each["piece"]) for each in pieces]
    assert b"".join(raw).decode() == text
    ids = [each["id"] for each in pieces]
    assert ports["llamacpp"].post("/detokenize", json={"tokens": ids}).json() == {"content": text}


def test_the_prompt_is_told_with_its_log_probabilities(ports: dict[str, httpx.Client]) -> None:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 1, "decoder_input_details": True}}
    prefill = ports["tgi"].post("/generate", json=body).json()["details"]["prefill"]
    assert "".join(token["text"] for token in prefill).endswith(PROMPT)
    assert prefill[0]["logprob"] is None
    assert all(token["logprob"] < 0 for token in prefill[1:])


@pytest.mark.parametrize("given", SAMPLERS.values(), ids=SAMPLERS)
def test_samplers_are_reached_by_both_apis_and_repeat_by_seed(
    ports: dict[str, httpx.Client], given: dict[str, Any]
) -> None:
    def completed(seed: int) -> str:
        body = {"prompt": PROMPT, "n_predict": 12, "seed": seed, "temperature": 0.9, **given}
        answer = ports["llamacpp"].post("/completion", json=body)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["content"]
        return text

    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "seed": 3, "temperature": 0.9, **given}
    answer = ports["openai"].post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == completed(3) == completed(3)


def test_samplers_go_with_a_grammar(ports: dict[str, httpx.Client]) -> None:
    body = {"prompt": PROMPT, "n_predict": 20, "grammar": 'root ::= "yes" | "no"', "mirostat": 2, "mirostat_tau": 0.1}
    assert ports["llamacpp"].post("/completion", json=body).json()["content"] in ("yes", "no")


def test_values_out_of_range_are_refused_by_name(ports: dict[str, httpx.Client]) -> None:
    for name, value in (("mirostat", 3), ("xtc_threshold", 2), ("dry_base", 0.5), ("typical_p", -1)):
        answer = ports["llamacpp"].post("/completion", json={"prompt": PROMPT, name: value})
        assert answer.status_code == 400
        assert f"'{name}'" in answer.json()["error"]["message"]


def test_a_model_without_marks_does_not_fill_in_the_middle(ports: dict[str, httpx.Client]) -> None:
    answer = ports["llamacpp"].post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (501, "not_supported_error")
