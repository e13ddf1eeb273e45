"""Each field that OpenAI's client knows is served, without effect or refused, as the page of families says."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from support.mock_llm import user

from docs.generate import read_openai_fields

FIELDS = read_openai_fields()
PARAMS: dict[str, Any] = {
    "POST /v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
    "POST /v1/completions": completion_create_params.CompletionCreateParamsBase,
    "POST /v1/embeddings": embedding_create_params.EmbeddingCreateParams,
    "POST /v1/responses": response_create_params.ResponseCreateParamsBase,
}
BODY: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": user("one")},
    "POST /v1/completions": {"prompt": "one"},
    "POST /v1/embeddings": {"input": "one"},
    "POST /v1/responses": {"input": "one"},
}


@pytest.mark.parametrize("route", FIELDS)
def test_the_page_has_the_fields_of_the_client(route: str) -> None:
    """The client may be older than the page, and lack some."""
    known = set(PARAMS[route].__annotations__)
    assert known - FIELDS[route].keys() == set()
    assert {state for state, _ in FIELDS[route].values()} <= {"served", "no effect", "refused"}


@pytest.mark.parametrize("route", FIELDS)
def test_each_field_is_read(http: httpx.Client, route: str) -> None:
    """One that is refused is named, and so is any other whose value has no type that it could have."""
    path = route.partition(" ")[2]
    for name, (state, _) in FIELDS[route].items():
        values: tuple[Any, ...] = (True, "x", {"x": 1}) if state == "refused" else (5.5, {"x": [5]}, "\x00")
        answers = [http.post(path, json={"model": "mock", **BODY[route], name: value}) for value in values]
        refused = [each.json()["error"]["param"] or "" for each in answers if each.status_code == 400]
        assert any(param.partition(".")[0] == name for param in refused), (name, refused)
        if state != "refused":
            assert all(param.partition(".")[0] == name for param in refused), (name, refused)
