"""Errors as OpenAI has them: unknown models and paths, bodies that are none, limits, overload."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.mock_llm import say, user, write_mock_llm
from support.serving import RunningServer, running_server
from support.waiting import until_true

from modelserver.errors import (
    ErrorCode,
    InternalError,
    InvalidArgumentError,
    QueueFullError,
    ServerError,
    UnavailableError,
)
from modelserver.frontends.llm.errors import ParameterError, UnknownToolFormatError
from modelserver.frontends.openai.errors import KINDS, OpenAiErrors

CHAT = "/v1/chat/completions"


def test_the_table_is_total() -> None:
    assert set(KINDS) == set(ErrorCode)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError("full"), 429, "rate_limit_exceeded"),
        (UnavailableError("not yet"), 503, "unavailable"),
        (ServerError("late", code=ErrorCode.TIMED_OUT), 504, "timeout"),
        (InternalError("oh"), 500, None),
        (ValueError("secret"), 500, None),
    ],
)
def test_kinds(error: Exception, status: int, code: str | None) -> None:
    found, document = OpenAiErrors().describe(error)
    assert (found, document["error"]["code"], document["error"]["param"]) == (status, code, None)
    assert "secret" not in document["error"]["message"]


def test_who_is_refused_for_overload_is_told_to_wait() -> None:
    assert ("Retry-After", "1") in list(OpenAiErrors().failed(QueueFullError("full")).headers)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"])
def test_an_unknown_model(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"model": "nobody", "messages": user("a"), "prompt": "a", "input": "a"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "agent, encoder, mock, oss, plain" in error["message"]


def test_no_model_where_there_are_several(http: httpx.Client) -> None:
    answer = http.post(CHAT, json={"messages": user("a")})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"
    # There is only one that makes embeddings and has no other use, but two that make some.
    assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 400


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b'{"a": NaN}', b"\xff", b"[" * 200 + b"]" * 200])
def test_a_body_that_is_no_object(http: httpx.Client, body: bytes) -> None:
    answer = http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_body_of_another_type(http: httpx.Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = http.post(CHAT, content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 415
        assert answer.json()["error"]["code"] == "unsupported_media_type"
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
        assert http.post(CHAT, content=b"{}", headers={"Content-Type": kind}).status_code == 400


def test_compressed_bodies(http: httpx.Client) -> None:
    body = b'{"model": "mock", "prompt": "a b"}'
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = http.post("/v1/completions", content=gzip.compress(body), headers=headers)
    assert answer.json()["choices"][0]["text"] == "a b"
    assert http.post("/v1/completions", content=body, headers=headers).status_code == 400
    assert http.post("/v1/completions", content=body, headers=headers | {"Content-Encoding": "x"}).status_code == 415


def test_paths_and_methods(http: httpx.Client) -> None:
    unknown = http.get("/v1/modles")
    assert unknown.status_code == 404
    assert "did you mean /v1/models" in unknown.json()["error"]["message"]
    wrong = http.get(CHAT)
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/model/mock", "did you mean /v1/models/mock?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/models/mock/infer", "did you mean /v2/models/mock/infer?"),
        ("/v2/models/mock/infr", "did you mean /v2/models/mock/infer?"),
        ("/v1/nothing", "paths here begin with /v1/audio, /v1/batches, /v1/chat, /v1/completions, /v1/conversations,"),
        ("/v2/nothing", "paths here begin with /v2/"),
        ("/elsewhere", "paths here begin with /api, /apply-template,"),
        ("/health/ready", "did you mean /v2/health/ready?"),
        ("/healthz", "did you mean /health?"),
        ("/v1/health", "did you mean /health?"),
        ("/v2/version", "did you mean /version?"),
        ("/version/2", "did you mean /version?"),
        ("/v3/models/mock/infer", "did you mean /v2/models/mock/infer?"),
    ],
)
def test_a_hint_stays_within_the_api_that_was_asked(http: httpx.Client, path: str, hint: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert hint in message
    assert "/v1/" not in message or not path.startswith("/v2")
    assert "/v2/" not in message or not path.startswith("/v1")


@pytest.mark.parametrize(
    ("method", "path", "has_code"),
    [
        ("DELETE", "/v1/models", True),
        ("DELETE", "/tokenize", True),
        ("GET", "/tokenize/more", True),
        ("DELETE", "/health", True),
        ("GET", "/v1", True),
        ("GET", "/v1/nothing", True),
        ("DELETE", "/v2/models", False),
        ("GET", "/v2/nothing", False),
        ("GET", "/nothing", False),
    ],
)
def test_what_no_handler_gets_is_refused_in_the_form_of_its_api(
    http: httpx.Client, method: str, path: str, has_code: bool
) -> None:
    answer = http.request(method, path)
    assert answer.status_code in (404, 405)
    assert isinstance(answer.json()["error"], dict) is has_code


def test_a_body_over_the_limit(tmp_path: Path) -> None:
    write_mock_llm(tmp_path, "mock")
    with running_server(tmp_path, http_max_input_size=2000) as server:
        for is_http2 in (False, True):
            with httpx.Client(http1=not is_http2, http2=is_http2, base_url=f"http://{server.http_url}") as client:
                for path in (CHAT, "/tokenize"):
                    answer = client.post(path, json={"messages": user("a" * 3000)})
                    assert answer.status_code == 413
                    assert answer.json()["error"]["code"] == "request_too_large"
                    chunked = client.post(path, content=iter([b" " * 1500, b" " * 1500]))
                    assert chunked.json()["error"]["code"] == "request_too_large"
                assert isinstance(client.post("/v2/models/mock/infer", content=b" " * 3000).json()["error"], str)
        with openai.OpenAI(base_url=f"http://{server.http_url}/v1", api_key="none", max_retries=0) as asking:
            with pytest.raises(openai.APIStatusError, match="raise it with --http-max-input-size") as refused:
                asking.chat.completions.create(model="mock", messages=user("a" * 3000))  # type: ignore[arg-type]
            assert refused.value.code == "request_too_large"
        zeros = gzip.compress(b" " * 100_000)
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        answer = httpx.post(f"http://{server.http_url}{CHAT}", content=zeros, headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        # The only model need not be named.
        assert httpx.post(f"http://{server.http_url}{CHAT}", json={"messages": user("a")}).status_code == 200


def test_one_refused_prompt_is_the_answer_for_all(client: openai.OpenAI, llm_server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="too bad"):
        client.completions.create(model="mock", prompt=[say(hang=1, text="a b"), say(refuse="too bad")])
    model = llm_server.server.repository.get("mock", None)
    until_true(lambda: model.inflight == 0, "the others were cancelled")
    with pytest.raises(openai.InternalServerError, match="broke"):
        client.completions.create(model="mock", prompt=["fine", say(text="a b", error=1), "fine"])


@pytest.mark.parametrize(
    ("message", "document", "param"),
    [
        ("structured output: JSON schema at #: no", {"response_format": {"type": "json_schema"}}, "response_format"),
        (
            "structured output: JSON schema at #: no",
            {"guided_json": {}, "structured_outputs": {"json": 1}},
            "structured_outputs",
        ),
        ("the model's chat template refuses these messages: roles", {"messages": [{}], "tools": [{}]}, "messages"),
        ("structured output: no text matches", {"tools": [{}], "tool_choice": "required"}, "tools"),
        ("input 'input_ids': 9 is no token", {"tokens": [9]}, "tokens"),
        ("input 'input_ids': 9 is no token", {"prompt": [9]}, "prompt"),
    ],
)
def test_words_of_a_model_are_laid_to_what_they_are_about(message: str, document: dict[str, Any], param: str) -> None:
    error = OpenAiErrors().placed(InvalidArgumentError(message), document)
    assert isinstance(error, ParameterError)
    assert (error.message, error.param) == (message, param)


def test_a_model_that_cannot_choose_tools_is_refused_in_the_words_of_the_api() -> None:
    error = OpenAiErrors().placed(UnknownToolFormatError("no tool_parser"), {"tools": []})
    assert isinstance(error, ParameterError)
    assert error.message == "no tool_parser; use tool_choice required, a named function, or none"
    status, document = OpenAiErrors().describe(error)
    assert status == 400
    assert (document["error"]["param"], document["error"]["code"]) == ("tool_choice", "unsupported_parameter")
