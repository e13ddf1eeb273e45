"""Paths that TGI shares with other APIs: on a port of its own they are TGI's."""

from __future__ import annotations

import httpx


def test_tokens_have_their_places(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"inputs": "día  único"}).json()
    assert [(token["text"], token["start"], token["stop"]) for token in tokens] == [
        ("día", 0, 3),
        ("  único", 3, 10),
    ]
    assert all(isinstance(token["id"], int) for token in tokens)


def test_health_is_in_tgis_words(http: httpx.Client) -> None:
    for path in ("/", "/health", "/ping"):
        answer = http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_sagemaker_calls_are_generations(http: httpx.Client) -> None:
    assert http.post("/invocations", json={"inputs": "one"}).json() == [{"generated_text": "oneone"}]


def test_openais_routes_are_there_too(http: httpx.Client) -> None:
    asked = {"model": "mock", "messages": [{"role": "user", "content": "one"}]}
    assert http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"] == "one"
    assert "mock" in [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert http.get("/v2/health/live").status_code == 404


def test_the_shared_port_keeps_the_paths_of_others(shared: httpx.Client) -> None:
    assert shared.post("/tokenize", json={"prompt": "one"}).json()["count"] == 1
    assert shared.get("/health").content == b""
    for path, status in (("/", 405), ("/invocations", 404)):
        assert shared.post(path, json={"inputs": "one"}).status_code == status
    assert shared.post("/generate", json={"inputs": "one"}).json() == {"generated_text": "one"}


def test_a_conversation_becomes_text_and_tokens(http: httpx.Client) -> None:
    answer = http.post("/chat_tokenize", json={"messages": [{"role": "user", "content": "one two"}]}).json()
    assert answer["templated_text"] == "one two"
    assert [token["text"] for token in answer["tokenize_response"]] == ["one", " two"]


def test_the_model_is_described(http: httpx.Client) -> None:
    info = http.get("/info").json()
    assert (info["model_id"], info["max_input_tokens"], info["max_total_tokens"]) == ("mock", 511, 512)
    assert info["router"] == "text-generation-router"
