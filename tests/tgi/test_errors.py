"""What TGI's API refuses, in whose words, and what it does when clients leave, keys are missing or paths unknown."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError as HubValidationError
from support.events import events_of
from support.keys import KeyFile
from support.layouts import ADDRESS, free_port
from support.mock_llm import say, write_mock_llm
from support.serving import RunningServer, running_server
from support.waiting import until_true
from text_generation import Client
from text_generation.errors import GenerationError

from modelserver.auth.api_keys import Scope
from modelserver.errors import (
    CancelledError,
    InternalError,
    InvalidArgumentError,
    QueueFullError,
    QuotaError,
    ServerError,
    UnavailableError,
    UnsupportedError,
)
from modelserver.frontends.tgi.errors import TgiErrors


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 0}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"best_of": 0}, "`best_of` must be > 0 and <= 16. Given: 0"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"top_n_tokens": 99}, "`top_n_tokens` must be >= 0 and <= 20. Given: 99"),
        ({"stop": ["a"] * 65}, "`stop` supports up to 64 stop sequences. Given: 65"),
        ({"truncate": 0}, "`truncate` must be strictly positive"),
        ({"watermark": True}, "`watermark` is not supported"),
        ({"adapter_id": "mine"}, "`adapter_id` is not supported"),
        ({"grammar": {"type": "json", "value": "{"}}, "grammar is not valid"),
        ({"grammar": {"type": "lark", "value": "x"}}, "'parameters.grammar.type' must be one of json"),
        ({"temperature": "hot"}, "'parameters.temperature' must be a number"),
    ],
)
def test_wrong_parameters_are_refused_in_the_words_that_clients_know(
    http: httpx.Client, parameters: dict[str, Any], sentence: str
) -> None:
    answer = http.post("/generate", json={"inputs": "one", "parameters": parameters})
    assert answer.status_code == 422
    assert answer.json()["error_type"] == "validation"
    assert answer.json()["error"].startswith(f"Input validation error: {sentence}")


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
        ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
    ],
)
def test_what_cannot_be_streamed_is_refused(http: httpx.Client, parameters: dict[str, Any], sentence: str) -> None:
    answer = http.post("/generate_stream", json={"inputs": "one", "parameters": parameters})
    assert (answer.status_code, answer.json()["error"]) == (422, f"Input validation error: {sentence}")


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"inputs": 7}', b'{"inputs": ""}', b"{}"])
def test_a_body_without_a_prompt_is_refused(http: httpx.Client, body: bytes) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(hub: InferenceClient) -> None:
    with pytest.raises(HubValidationError, match=r"must have less than 513 tokens. Given: 600"):
        hub.text_generation(" ".join(["word"] * 600))


def test_failures_of_the_model_are_told_before_and_within_a_stream(client: Client, http: httpx.Client) -> None:
    with pytest.raises(GenerationError, match="the model broke"):
        client.generate(say(text="one two", error=0))
    assert http.post("/generate", json={"inputs": say(text="one two", error=0)}).status_code == 424
    last = events_of(http.post("/generate_stream", json={"inputs": say(text="one two", error=1)}).text)[-1]
    assert last["error_type"] == "generation"
    assert last["error"].startswith("Request failed during generation: ")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFullError("no room"), 429, "overloaded"),
        (QuotaError("too many"), 429, "overloaded"),
        (InternalError("broke"), 424, "generation"),
        (CancelledError("ended"), 500, "incomplete_generation"),
        (UnavailableError("loads"), 503, "unavailable"),
        (InvalidArgumentError("wrong"), 422, "validation"),
        (UnsupportedError("not here"), 422, "validation"),
    ],
)
def test_errors_have_the_statuses_and_types_of_tgi(error: ServerError, status: int, kind: str) -> None:
    answer = TgiErrors().failed(error)
    assert (answer.status, json.loads(bytes(answer.body[0]))["error_type"]) == (status, kind)


def _send(port: int, inputs: str) -> socket.socket:
    connection = socket.create_connection((ADDRESS, port))
    text = json.dumps({"inputs": inputs})
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    connection.sendall((head + text).encode())
    return connection


def test_a_client_that_leaves_cancels_what_it_asked(tgi_server: RunningServer, tgi_port: int) -> None:
    def num_inflight() -> int:
        return tgi_server.server.repository.get("mock", None).inflight

    with _send(tgi_port, say(text="one two", hang=1)):
        until_true(lambda: num_inflight() == 1, "the model has the request")
    until_true(lambda: num_inflight() == 0, "it was cancelled")


def test_keys_are_checked_in_this_form(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_mock_llm(root, "mock")
    keys = KeyFile(tmp_path / "keys.yaml")
    key = keys.add("client", Scope.INFER)
    port = free_port()
    with running_server(root, api_keys_file=str(keys.path), api=(f"tgi={port}",)):
        refused = httpx.post(f"http://{ADDRESS}:{port}/generate", json={"inputs": "one"})
        assert (refused.status_code, refused.json()["error_type"]) == (401, "unauthenticated")
        client = Client(f"http://{ADDRESS}:{port}", headers={"Authorization": f"Bearer {key}"})
        assert client.generate("one").generated_text == "one"


def test_bodies_are_bounded_and_unknown_methods_refused_in_this_form(tmp_path: Path, http: httpx.Client) -> None:
    write_mock_llm(tmp_path, "mock")
    with running_server(tmp_path, http_max_input_size=1000) as server:
        answer = httpx.post(f"http://{server.http_url}/generate", json={"inputs": "x" * 2000})
        assert answer.status_code == 413
    wrong = http.get("/generate")
    assert (wrong.status_code, wrong.json()["error_type"]) == (405, "method_not_allowed")
    unknown = http.post("/generate?model=none", json={"inputs": "one"})
    assert (unknown.status_code, unknown.json()["error_type"]) == (404, "not_found")
