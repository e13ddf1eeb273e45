"""The page /docs in a browser, as a person uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.keys import KeyFile
from support.serving import RunningServer
from support.tools import tool

pytestmark = pytest.mark.tool("chromium", "playwright")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=tool("chromium"), args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """As wide as a telephone. What it logs and what fails in it fails the test."""
    opened = browser.new_page(viewport={"width": 360, "height": 740})
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda line: problems.append(line.text) if "Content Security Policy" in line.text else None)
    yield opened
    opened.close()
    assert problems == []


def is_narrow(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def test_a_route_is_found_and_called(page: Any, open_server: RunningServer) -> None:
    page.goto(f"http://{open_server.http_url}/docs")
    page.keyboard.press("/")
    page.keyboard.type("post chat completions")
    route = page.locator("details.route").first
    route.locator("summary").first.click()
    assert route.locator("code", has_text="messages").first.is_visible()
    body = route.locator("textarea")
    assert '"content": "Hello"' in body.input_value()
    body.fill('{"model": "mock", "messages": [{"role": "user", "content": "good day"}], "stream": true}')
    route.get_by_role("button", name="Send").press("Enter")
    route.get_by_text("[DONE]").wait_for()
    assert route.get_by_role("status").inner_text().startswith("200 text/event-stream")
    assert is_narrow(page)


def test_a_model_has_a_form_with_an_example_that_works(page: Any, open_server: RunningServer) -> None:
    page.goto(f"http://{open_server.http_url}/docs/")
    page.get_by_label("Find a route").fill("/v2/models/same/infer")
    route = page.locator("details.route").first
    route.locator("summary").first.click()
    route.get_by_role("button", name="Send").click()
    route.get_by_text("OUTPUT0").first.wait_for()
    assert route.get_by_role("status").inner_text().startswith("200 application/json")


def test_a_key_opens_the_page_and_stays_in_memory(page: Any, keyed_server: RunningServer, keys: KeyFile) -> None:
    page.goto(f"http://{keyed_server.http_url}/docs")
    page.get_by_text("This server needs an API key.").wait_for()
    page.get_by_label("API key").fill(keys.texts["tenant"])
    page.keyboard.press("Tab")
    page.locator("details.group").first.wait_for()
    assert page.get_by_text("This server needs an API key.").is_hidden()
    page.get_by_label("Find a route").fill("GET /v1/models")
    route = page.locator("details.route").first
    route.locator("summary").first.click()
    route.get_by_role("button", name="Send").click()
    route.get_by_text('"mock"').first.wait_for()
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    page.reload()
    page.get_by_text("This server needs an API key.").wait_for()
