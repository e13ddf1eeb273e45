"""Calls that need a key, and headers that models get."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from support.mock_llm import say, user, write_mock_llm
from support.serving import RunningServer, running_server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("guarded")
    write_mock_llm(root, "mock")
    rules = ("inference:Authorization=Bearer sk-1", "metadata:admin-key=secret")
    with running_server(root, http_restricted_api=rules, http_header_forward_pattern="^x-tenant") as running:
        yield running


def test_the_client_s_api_key_is_looked_at(guarded: RunningServer) -> None:
    url = f"http://{guarded.http_url}/v1"
    with openai.OpenAI(base_url=url, api_key="sk-1", max_retries=0) as client:
        answer = client.chat.completions.create(model="mock", messages=user("a"))  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "a"
        with pytest.raises(openai.PermissionDeniedError, match="admin-key"):
            client.models.list()
        models = client.models.list(extra_headers={"admin-key": "secret"})
        assert [model.id for model in models] == ["mock"]
    with openai.OpenAI(base_url=url, api_key="sk-2", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.chat.completions.create(model="mock", messages=user("a"))  # type: ignore[arg-type]
        assert refused.value.code == "invalid_api_key"


def test_headers_are_forwarded_to_the_model(guarded: RunningServer) -> None:
    headers = {"Authorization": "Bearer sk-1", "X-Tenant-Id": "t1"}
    body = {"model": "mock", "prompt": say(report=True), "max_tokens": 400}
    answer = httpx.post(f"http://{guarded.http_url}/v1/completions", json=body, headers=headers)
    assert json.loads(answer.json()["choices"][0]["text"])["parameters"] == {"X-Tenant-Id": "t1"}


def test_health_is_for_all(guarded: RunningServer) -> None:
    assert httpx.get(f"http://{guarded.http_url}/health").status_code == 200


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions", "/v1/embeddings"])
def test_every_call_of_a_model_needs_the_key(guarded: RunningServer, path: str) -> None:
    url = f"http://{guarded.http_url}{path}"
    assert httpx.post(url, json={}).status_code == 401
    assert httpx.post(url, json={}, headers={"Authorization": "Bearer sk-1"}).status_code == 400
