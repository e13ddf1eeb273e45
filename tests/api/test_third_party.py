"""The API of docs/add-an-api.md, installed by pip from outside of the tree, and called as its clients do."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.keys import KeyFile
from support.layouts import free_port
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import Scope
from modelserver.errors import InvalidArgumentError

DOCUMENT = Path(__file__).parents[2] / "docs" / "add-an-api.md"
ROWS = {"rows": [[1, 2], [3, 4]]}
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the package that the page's code blocks make."""
    package = tmp_path_factory.mktemp("score-api")
    page = DOCUMENT.read_text()
    (package / "pyproject.toml").write_text(block(page, "toml"))
    (package / "score_api.py").write_text(block(page, "python"))
    site = tmp_path_factory.mktemp("site")
    install(package, site)
    return site


def block(page: str, language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return str(found)


def install(package: Path, site: Path) -> None:
    """Without a network: build and install with what is here."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(site), str(package)], check=True, timeout=300)


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with importable(site, monkeypatch):
        yield


@contextmanager
def importable(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))  # of the front processes
    importlib.invalidate_caches()
    yield
    for name in ("score_api", "broken_api"):
        sys.modules.pop(name, None)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_identity(tmp_path / "models", "identity")
    return tmp_path / "models"


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    file = KeyFile(tmp_path / "keys.yaml")
    file.add("user", Scope.INFER)
    file.add("tenant", Scope.INFER, models=("other*",))
    file.add("watcher", Scope("score:report"))
    return file


@pytest.fixture(params=["HTTP/1.1", "HTTP/2"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def client_of(running: RunningServer, version: str = "HTTP/1.1", **details: Any) -> httpx.Client:
    is_http2 = version == "HTTP/2"
    return httpx.Client(
        base_url=f"http://{running.http_url}", http1=not is_http2, http2=is_http2, timeout=PATIENCE_S, **details
    )


def bearer(keys: KeyFile, name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {keys.texts[name]}"}


def test_it_answers(installed: None, models: Path, version: str) -> None:
    with running_server(models) as running, client_of(running, version) as client:
        answer = client.post("/score/identity", json=ROWS)
        assert (answer.status_code, answer.json()) == (200, json.loads(block(DOCUMENT.read_text(), "json")))
        assert answer.http_version == version
        assert client.get("/score").json() == {"models": ["identity"]}
        operation = client.get("/openapi.json").json()["paths"]["/score/{model}"]["post"]
        assert (operation["summary"], operation["tags"]) == ("Scores of rows", ["score"])
        # The server's own APIs are as they were.
        assert client.get("/v2/health/ready").status_code == 200
        assert client.get("/v1/models").status_code == 200


def test_it_streams_events(installed: None, models: Path, version: str) -> None:
    with (
        running_server(models) as running,
        client_of(running, version) as client,
        client.stream("POST", "/score/identity/stream", json=ROWS) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [event.split("\n") for event in answer.read().decode().strip().split("\n\n")]
    assert [event[0] for event in events] == ["event: score"] * 2
    assert [json.loads(event[1].removeprefix("data: ")) for event in events] == [
        {"row": 0, "scores": [1, 2]},
        {"row": 1, "scores": [3, 4]},
    ]


def test_its_errors_have_its_own_form(installed: None, models: Path, version: str) -> None:
    with running_server(models) as running, client_of(running, version) as client:
        for path, method, body, status, reason in (
            ("/score/identity", "POST", {"rows": "none"}, 400, "invalid_argument"),
            ("/score/identity", "POST", [1], 400, "invalid_argument"),
            ("/score/none", "POST", ROWS, 404, "not_found"),
            ("/score/identity/nothing", "POST", ROWS, 404, "not_found"),
            ("/score/identity", "DELETE", None, 405, "method_not_allowed"),
        ):
            answer = client.request(method, path, json=body)
            assert answer.status_code == status, (path, answer.text)
            assert answer.json()["failure"]["reason"] == reason, path
        assert answer.headers["allow"] == "POST"
        assert "did you mean /score/identity/stream?" in client.get("/score/identity/strem").json()["failure"]["text"]
        # Other paths are answered in the forms of their own APIs.
        assert isinstance(client.get("/nothing").json()["error"], str)
        assert isinstance(client.get("/v1/nothing").json()["error"], dict)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_body_over_the_limit_is_refused_in_its_form(installed: None, models: Path, num_processes: int) -> None:
    options = {"http_max_input_size": 100, "wire_processes": num_processes}
    with running_server(models, **options) as running, client_of(running) as client:
        answer = client.post("/score/identity", json={"rows": [[1] * 100]})
    assert answer.status_code == 413
    assert answer.json()["failure"]["reason"]


def test_keys_and_scopes(installed: None, models: Path, keys: KeyFile, version: str) -> None:
    with running_server(models, api_keys_file=str(keys.path)) as running, client_of(running, version) as client:
        for name, path, method, status in (
            (None, "/score/identity", "POST", 401),
            (None, "/score/nothing/nothing/nothing", "POST", 401),
            ("user", "/score/identity", "POST", 200),
            ("user", "/score/identity/stream", "POST", 200),
            ("tenant", "/score/identity", "POST", 403),
            ("watcher", "/score/identity", "POST", 403),
            ("user", "/score/report", "GET", 403),
            ("watcher", "/score/report", "GET", 200),
        ):
            headers = {} if name is None else bearer(keys, name)
            answer = client.request(method, path, json=ROWS if method == "POST" else None, headers=headers)
            assert answer.status_code == status, (name, path, answer.text)
            if status >= 400:
                assert answer.json()["failure"]["reason"] in ("unauthenticated", "permission_denied")
            assert ("www-authenticate" in answer.headers) == (status == 401)
        # The planes leave out what is not the caller's.
        assert client.get("/score", headers=bearer(keys, "tenant")).json() == {"models": []}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_large_body_without_a_key_is_refused_by_its_head(
    installed: None, models: Path, keys: KeyFile, num_processes: int
) -> None:
    options: dict[str, Any] = {"api_keys_file": str(keys.path), "wire_processes": num_processes}
    with running_server(models, **options) as running, client_of(running) as client:
        answer = client.post("/score/identity", content=b" " * (4 << 20), headers={"Expect": "100-continue"})
        assert (answer.status_code, answer.json()["failure"]["reason"]) == (401, "unauthenticated")


def test_a_front_without_the_package_leaves_its_errors_to_the_core(
    installed: None, models: Path, keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    options: dict[str, Any] = {"api_keys_file": str(keys.path), "wire_processes": 2}
    with running_server(models, **options) as running, client_of(running) as client:
        for path in ("/score/identity", "/score/nothing/nothing/nothing"):
            answer = client.post(path, json=ROWS)
            assert (answer.status_code, answer.json()["failure"]["reason"]) == (401, "unauthenticated")


def test_a_client_that_leaves_ends_its_call(installed: None, models: Path, version: str) -> None:
    with running_server(models) as running, client_of(running, version) as client:
        # Closes its connection: over HTTP/2 this client does not tell that it wants no more of a stream.
        with (
            client_of(running, version) as leaver,
            leaver.stream("POST", "/score/identity/stream", json={"rows": [[1, 2]] * 100_000}) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            next(answer.iter_raw())
        deadline = time.monotonic() + PATIENCE_S
        while client.get("/score/report").json() != {"calls": 1, "left": 1}:
            assert time.monotonic() < deadline, client.get("/score/report").text
            time.sleep(0.01)


def test_on_a_port_of_its_own(installed: None, models: Path, keys: KeyFile, version: str) -> None:
    port = free_port()
    with (
        running_server(models, api=(f"score={port}",), api_keys_file=str(keys.path)) as running,
        client_of(running, version) as client,
    ):
        assert running.server.port_of("score") == port
        assert running.server.addresses["score"] == f"http://127.0.0.1:{port}"
        url = f"http://127.0.0.1:{port}"
        assert client.post(f"{url}/score/identity", json=ROWS, headers=bearer(keys, "user")).status_code == 200
        for path in ("/score/identity", "/v2/health/live", "/nothing"):
            refused = client.post(f"{url}{path}", json=ROWS)
            assert (refused.status_code, refused.json()["failure"]["reason"]) == (401, "unauthenticated")
        # It is there alone, and the others are not there.
        assert client.post("/score/identity", json=ROWS, headers=bearer(keys, "user")).status_code == 404
        assert client.get(f"{url}/v2", headers=bearer(keys, "user")).status_code == 404


def test_switched_off(installed: None, models: Path) -> None:
    with running_server(models, api=("score=off", "openai=off")) as running, client_of(running) as client:
        assert client.get("/score").status_code == 404
        assert client.get("/v1/models").status_code == 404
        assert "score_api" not in sys.modules


def test_an_unknown_api_is_named(installed: None, models: Path) -> None:
    with (
        pytest.raises(InvalidArgumentError, match=r"--api: there is no API 'scores', .*did you mean 'score'"),
        running_server(models, api=("scores=off",)),
    ):
        pass


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def create_api(context):\n    raise ValueError('no license')", "ValueError: no license"),
        ("def create_api(context):\n    return None", "expected an Api, got NoneType"),
        (
            "from modelserver.api import Api, ApiGroup, Route\n"
            "def create_api(context):\n"
            "    return Api(context.name, (Route('GET', '/v2/models', print, ApiGroup.METADATA),))",
            "the route GET /v2/models is there twice: of the API 'KServe', and of 'broken'",
        ),
    ],
)
def test_a_broken_one_is_named(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, source: str, what: str
) -> None:
    site = tmp_path / "site"
    info = site / "broken_api-2.0.dist-info"
    info.mkdir(parents=True)
    (site / "broken_api.py").write_text(source)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-api\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[modelserver.apis]\nbroken = broken_api:create_api\n")
    with importable(site, monkeypatch):
        with pytest.raises(InvalidArgumentError) as caught, running_server(models):
            pass
        assert what in caught.value.message
        assert "broken" in caught.value.message
        with running_server(models, api=("broken=off",)) as running, client_of(running) as client:
            assert client.get("/v2").status_code == 200
