from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from support.http_calls import ask_now

from modelserver.auth.access import Access
from modelserver.auth.guard import Guard
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.frontends.http.static_files import static_routes
from modelserver.protocol.api import Api

SCRIPT = b"export const answer = 42;\n" * 20


@pytest.fixture
def frontend(tmp_path: Path) -> HttpFrontend:
    (tmp_path / "index.html").write_text("<!doctype html><title>Page</title>")
    (tmp_path / "page.js").write_bytes(SCRIPT)
    (tmp_path / "LICENSE").write_text("not a page")
    return HttpFrontend([Api("page", static_routes("/page", tmp_path))], Guard(Access()))


def test_the_page_and_its_files(frontend: HttpFrontend) -> None:
    page = ask_now(frontend, "GET", "/page")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    script = ask_now(frontend, "GET", "/page/page.js")
    assert (script.status, script.headers["content-type"], script.body) == (
        200,
        "text/javascript; charset=utf-8",
        SCRIPT,
    )
    for name in ("LICENSE", "index.html", "..%2fpage.js", "%2e%2e/secret.js"):
        assert ask_now(frontend, "GET", f"/page/{name}").status == 404


def test_nothing_inline_runs_and_nothing_of_other_hosts_is_loaded(frontend: HttpFrontend) -> None:
    headers = ask_now(frontend, "GET", "/page").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


def test_a_client_that_has_the_file_gets_no_second_copy(frontend: HttpFrontend) -> None:
    first = ask_now(frontend, "GET", "/page/page.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        again = ask_now(frontend, "GET", "/page/page.js", headers={"if-none-match": known})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    assert ask_now(frontend, "GET", "/page/page.js", headers={"if-none-match": '"other"'}).status == 200


def test_text_is_compressed_for_clients_that_prefer_that(frontend: HttpFrontend) -> None:
    packed = ask_now(frontend, "GET", "/page/page.js", headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == SCRIPT


def test_a_slash_at_the_end_leads_to_the_page(frontend: HttpFrontend) -> None:
    """Relative links of the page would else lead nowhere."""
    answer = ask_now(frontend, "GET", "/page/")
    assert (answer.status, answer.headers["location"]) == (308, "../page")
