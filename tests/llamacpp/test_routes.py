"""The other routes of llama.cpp's server, its errors, keys, and clients that leave."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest
from support.keys import KeyFile
from support.layouts import ADDRESS
from support.mock_llm import say, user, write_mock_llm
from support.serving import RunningServer, running_server
from support.waiting import until_true

from modelserver.auth.api_keys import Scope
from modelserver.frontends.llamacpp.routes import NOT_SERVED


def test_texts_become_tokens_and_back(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"content": "one two"}).json()["tokens"]
    assert len(ids) == 2
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"content": "one two"}
    pieces = http.post("/tokenize", json={"content": "one two", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": ids[0], "piece": "one"}, {"id": ids[1], "piece": " two"}]
    assert http.post("/tokenize", json={"content": ""}).json() == {"tokens": []}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"content": ""}


def test_a_conversation_becomes_a_prompt(http: httpx.Client) -> None:
    assert http.post("/apply-template", json={"messages": user("one two")}).json() == {"prompt": "one two"}


def test_embeddings_of_one_text_and_of_several(http: httpx.Client) -> None:
    one = http.post("/embedding", json={"content": "one two", "model": "encoder"}).json()
    assert one == [{"index": 0, "embedding": [[0.25, 0.375, 0.5, 0.625]]}]
    several = http.post(
        "/embeddings", json={"input": ["one", "one two"], "model": "encoder", "embd_normalize": 2}
    ).json()
    assert [each["index"] for each in several] == [0, 1]
    assert several[0]["embedding"] != several[1]["embedding"]
    refused = http.post("/embedding", json={"content": "one", "model": "encoder", "embd_normalize": 0})
    assert refused.status_code == 400


def test_the_server_describes_itself(http: httpx.Client) -> None:
    props = http.get("/props").json()
    assert (props["default_generation_settings"]["n_ctx"], props["model_alias"]) == (512, "mock")
    assert props["chat_template"] == "{{ messages[-1].content }}"
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/lora-adapters").json() == []
    assert http.get("/v1/models").json()["data"]


@pytest.mark.parametrize(("method", "path"), NOT_SERVED)
def test_what_is_not_served_is_refused_with_the_reason(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path.replace("{id_slot}", "0"))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (501, 501, "not_supported_error")
    assert NOT_SERVED[method, path] in error["message"]


def test_the_shared_port_keeps_the_paths_of_others(shared: httpx.Client) -> None:
    assert shared.post("/tokenize", json={"prompt": "one", "model": "mock"}).json()["count"] == 1
    assert shared.get("/health").content == b""
    assert shared.post("/completion", json={"prompt": "one", "model": "mock"}).json()["content"] == "one"


def test_unknown_paths_and_methods_are_refused_in_this_form(http: httpx.Client) -> None:
    for answer, status in ((http.get("/completion"), 405), (http.get("/slots/nothing/here"), 404)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)


def test_a_client_that_leaves_cancels_what_it_asked(llama_server: RunningServer, own_port: int) -> None:
    def num_inflight() -> int:
        return llama_server.server.repository.get("mock", None).inflight

    text = json.dumps({"prompt": say(text="one two", hang=1), "stream": True})
    head = (
        f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    with socket.create_connection((ADDRESS, own_port)) as connection:
        connection.sendall((head + text).encode())
        assert connection.recv(12) == b"HTTP/1.1 200"
        until_true(lambda: num_inflight() == 1, "the model has the request")
    until_true(lambda: num_inflight() == 0, "it was cancelled")


def test_keys_and_bounds_hold_in_this_form(tmp_path: Path) -> None:
    root = tmp_path / "models"
    write_mock_llm(root, "mock")
    keys = KeyFile(tmp_path / "keys.yaml")
    headers = {"Authorization": f"Bearer {keys.add('client', Scope.INFER)}"}
    with (
        running_server(root, api_keys_file=str(keys.path), http_max_input_size=1000) as server,
        httpx.Client(base_url=f"http://{server.http_url}", timeout=20) as http,
    ):
        refused = http.post("/completion", json={"prompt": "one"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert http.post("/completion", json={"prompt": "one"}, headers=headers).json()["content"] == "one"
        too_large = http.post("/completion", json={"prompt": "x" * 2000}, headers=headers)
        assert too_large.status_code == 413
