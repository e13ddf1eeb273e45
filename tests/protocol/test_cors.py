"""Web pages that call the server from a browser: preflights, keys, and what a page may read of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.keys import KeyFile
from support.mock_llm import user, write_mock_llm
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import Scope
from modelserver.errors import InvalidArgumentError
from modelserver.options.server_options import ServerOptions

PAGE, OTHER = "https://chat.example.com", "https://evil.example.com"
CHAT = "/v1/chat/completions"
INFER = "/v2/models/echo/infer"
DOCUMENT = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    file.add("infer", Scope.INFER)
    return file


@pytest.fixture(scope="module")
def served(layout: str, keys: KeyFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    write_identity(root, "echo")
    write_mock_llm(root, "mock")
    with running_server(
        root, api_keys_file=str(keys.path), http_cors_origin=(PAGE, "http://localhost:3000")
    ) as running:
        yield running


@pytest.fixture
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{served.http_url}", timeout=20) as client:
        yield client


def preflight(http: httpx.Client, path: str, origin: str, **headers: str) -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-own"}
    return http.options(path, headers={"Origin": origin, **asked, **headers})


@pytest.mark.parametrize("path", [CHAT, INFER, "/v1/models"])
def test_a_preflight_needs_no_key_and_tells_what_may_be_sent(http: httpx.Client, path: str) -> None:
    answer = preflight(http, path, PAGE)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization, x-own"
    assert "access-control-allow-credentials" not in answer.headers
    assert "Origin" in answer.headers["vary"]


def test_a_preflight_of_another_page_is_refused(http: httpx.Client) -> None:
    answer = preflight(http, CHAT, OTHER)
    assert answer.status_code == 403
    assert OTHER in answer.json()["error"]
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_page_reads_answers_and_refusals(http: httpx.Client, keys: KeyFile, is_streamed: bool) -> None:
    body = {"model": "mock", "messages": user("a"), "stream": is_streamed}
    headers = {"Origin": PAGE, "Authorization": f"Bearer {keys.texts['infer']}"}
    for given, status in ((headers, 200), ({"Origin": PAGE}, 401)):
        answer = http.post(CHAT, json=body, headers=given)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "Retry-After" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"] == "Origin"


def test_calls_of_other_pages_and_of_no_page_are_as_ever(http: httpx.Client, keys: KeyFile) -> None:
    """Inference twice: repeated requests take a shorter way."""
    for _ in range(2):
        for origin, expected in ((OTHER, None), (PAGE, PAGE), (None, None), (PAGE, PAGE)):
            headers = {"Authorization": f"Bearer {keys.texts['infer']}"} | ({"Origin": origin} if origin else {})
            answer = http.post(INFER, json=DOCUMENT, headers=headers)
            assert answer.json()["outputs"][0]["data"] == [1.0]
            assert answer.headers.get("access-control-allow-origin") == expected
            assert answer.headers.get("vary") == ("Origin" if origin else None)


def test_without_the_option_no_page_may_call(tmp_path: Path) -> None:
    write_identity(tmp_path, "echo")
    with running_server(tmp_path) as server, httpx.Client(base_url=f"http://{server.http_url}") as http:
        assert preflight(http, INFER, PAGE).status_code == 405
        answer = http.post(INFER, json=DOCUMENT, headers={"Origin": PAGE})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("options", "allowed", "credentials"),
    [
        ({"http_cors_origin": ("*",)}, "*", None),
        ({"http_cors_origin": (PAGE,), "http_cors_credentials": True}, PAGE, "true"),
        ({"http_cors_origin": ("HTTPS://Chat.Example.com",)}, PAGE, None),
    ],
)
def test_every_page_and_credentials(
    tmp_path: Path, options: dict[str, Any], allowed: str, credentials: str | None
) -> None:
    write_identity(tmp_path, "echo")
    with running_server(tmp_path, **options) as server, httpx.Client(base_url=f"http://{server.http_url}") as http:
        for answer in (preflight(http, INFER, PAGE), http.get("/v2", headers={"Origin": PAGE})):
            assert answer.headers["access-control-allow-origin"] == allowed
            assert answer.headers.get("access-control-allow-credentials") == credentials


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"http_cors_origin": ("chat.example.com",)}, "such as https://chat.example.com"),
        ({"http_cors_origin": ("https://chat.example.com/",)}, "expects an origin"),
        ({"http_cors_origin": ("*",), "http_cors_credentials": True}, "exclude each other"),
    ],
)
def test_what_is_no_origin_is_refused_at_the_start(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        ServerOptions(model_repository=("/m",), **options)
