"""The console's files without a browser: their headers, who gets them, and which pages may call the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from support.echo import EchoModel, echo_dataplane
from support.http_calls import HttpAnswer, ask_now
from support.keys import KeyFile
from support.layouts import free_port
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.app.frontends import http_frontend
from modelserver.auth.access import Cors
from modelserver.auth.api_keys import KeyRing, Scope
from modelserver.frontends.console import routes
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.protocol.limits import HttpLimits

STATIC = Path(routes.__file__).parent / "static"
FILES = sorted(path.name for path in STATIC.iterdir() if path.name != "index.html")
PAGE = {"accept": "text/html", "accept-language": "en", "host": "localhost:8000"}
LOAD = ("POST", "/v2/repository/index")


def frontend(cors: Cors | None = None, keys: KeyRing | None = None) -> HttpFrontend:
    control = type("Control", (), {"index": lambda *_: []})()
    return http_frontend(
        echo_dataplane(EchoModel("echo")), cast("Any", control), HttpLimits(cors=cors or Cors(is_local=True)), keys
    )


def console(path: str = "", **headers: str) -> HttpAnswer:
    return ask_now(
        frontend(), "GET", f"/console{path}", headers={key.replace("_", "-"): headers[key] for key in headers}
    )


@pytest.mark.parametrize("path", ["", *(f"/{name}" for name in FILES)])
def test_files_allow_a_browser_nothing_but_this_server(path: str) -> None:
    answer = console(path)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert (answer.status, policy["default-src"], policy["frame-ancestors"]) == (200, "'none'", "'none'")
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.body == (STATIC / (path.strip("/") or "index.html")).read_bytes()


def test_types_are_those_that_browsers_want() -> None:
    kinds = {console(f"/{name}").headers["content-type"].partition(";")[0] for name in FILES}
    assert kinds == {"text/css", "text/javascript", "image/svg+xml"}


@pytest.mark.parametrize("path", ["/nothing.js", "/..", "/%2e%2e%2froutes.py", "/.", "/app.js/more", "/index.html"])
def test_nothing_else_is_a_file(path: str) -> None:
    assert console(path).status == 404


def test_pages_have_no_inline_code_and_no_foreign_address() -> None:
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|<style", page)
    for name in (*FILES, "index.html"):
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(src|href|url|import|from|fetch)\W{1,3}(https?:)?//", text), name
        assert not re.search(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write|eval\(|new Function", text), name


def test_files_need_no_key_and_calls_do(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.yaml")
    keys.add("user", Scope.INFER)
    closed = frontend(keys=KeyRing(str(keys.path)))
    assert ask_now(closed, "GET", "/console").status == 200
    assert ask_now(closed, "GET", "/v2/models").status == 401


def test_a_page_of_another_site_makes_no_changes() -> None:
    for site in ("cross-site", "same-site"):
        headers = PAGE | {"sec-fetch-site": site, "sec-fetch-mode": "no-cors", "origin": "https://evil.example"}
        answer = ask_now(frontend(), *LOAD, headers=headers)
        assert answer.status == 403
        assert "pages of https://evil.example may not make this call; --http-cors-origin" in answer.error
        assert ask_now(frontend(), "GET", "/console", headers=headers).status == 200  # a link to the console
        allowed = Cors(("https://evil.example",))
        assert ask_now(frontend(allowed), *LOAD, headers=headers).status == 200


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_the_console_itself_and_the_address_bar_may_call(site: str) -> None:
    headers = PAGE | {"sec-fetch-site": site, "host": "models.example", "origin": "https://models.example"}
    assert ask_now(frontend(), *LOAD, headers=headers).status == 200


@pytest.mark.parametrize("path", ["/v2", "/console", "/v2/models/echo"])
def test_a_name_that_was_made_to_resolve_to_this_machine_gets_nothing(path: str) -> None:
    for host in ("evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "evil"):
        assert ask_now(frontend(), "GET", path, headers=PAGE | {"host": host}).status == 403, host
    for host in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "app.localhost", "10.0.0.7"):
        assert ask_now(frontend(), "GET", path, headers=PAGE | {"host": host}).status == 200, host


def test_other_clients_may_use_any_name() -> None:
    for more in ({}, {"accept-language": "*", "sec-fetch-mode": "cors"}):  # such as curl's, and Node's
        assert ask_now(frontend(), *LOAD, headers={"host": "models.internal", **more}).status == 200
    open_to_all = frontend(Cors(is_local=False))
    assert ask_now(open_to_all, *LOAD, headers=PAGE | {"host": "models.example"}).status == 200


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_identity(root)
    return root


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({}, 200),
        ({"http_address": "0.0.0.0"}, 404),
        ({"http_address": "0.0.0.0", "api": ("console=on",)}, 200),
        ({"api": ("console=off",)}, 404),
    ],
)
def test_it_is_there_on_loopback_and_where_asked_for(repository: Path, options: dict[str, Any], status: int) -> None:
    with running_server(repository, **options) as running:
        assert httpx.get(f"http://127.0.0.1:{running.server.http_port}/console").status_code == status


@pytest.fixture
def on_own_port(repository: Path) -> Iterator[RunningServer]:
    with running_server(repository, api=(f"console={free_port()}",)) as running:
        yield running


def test_on_a_port_of_its_own_it_has_the_apis_that_it_calls(on_own_port: RunningServer) -> None:
    assert httpx.get(f"http://{on_own_port.http_url}/console").status_code == 404
    own = f"http://127.0.0.1:{on_own_port.server.port_of('console')}"
    for path in ("console", "v2/overview", "v1/models", "metrics"):
        assert httpx.get(f"{own}/{path}").status_code == 200, path
