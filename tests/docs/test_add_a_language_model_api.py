"""The API of docs/add-a-language-model-api.md, built from the page and asked as a client would."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.http_calls import Exchange
from support.mock_llm import say, write_mock_llm
from support.serving import RunningServer, running_server

from modelserver.core.tensor import Buffer
from modelserver.protocol.exchange import ResponseWriter
from modelserver.protocol.limits import HttpLimits

PAGE = Path(__file__).parent.parent.parent / "docs" / "add-a-language-model-api.md"


class Streamed(Exchange):
    """An exchange that also takes an answer in pieces."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__("POST", "/stories", {"content-type": "application/json"}, json.dumps(body).encode())
        self.written = b""
        self.headers: dict[str, str] = {}
        self.ended = asyncio.Event()

    def start(self, status: int, headers: list[tuple[str, str]]) -> ResponseWriter:
        assert status == 200
        self.headers = dict(headers)
        return self

    def send(self, data: Buffer) -> bool:
        self.written += bytes(data)
        return True

    async def wait_for_room(self) -> None:
        """There is always room."""

    async def write(self, data: Buffer) -> None:
        self.send(data)

    async def close(self) -> None:
        self.ended.set()

    def respond(self, response: Any) -> None:
        super().respond(response)
        self.ended.set()


@pytest.fixture(scope="module")
def page() -> ModuleType:
    source = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = ModuleType("stories")
    sys.modules["stories"] = module
    exec(compile("".join(source), str(PAGE), "exec"), module.__dict__)
    return module


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("stories")
    write_mock_llm(root, "mock")
    with running_server(root) as running:
        yield running


def ask(page: ModuleType, served: RunningServer, **body: Any) -> Streamed:
    async def run() -> Streamed:
        exchange = Streamed({"model": "mock", **body})
        page.Stories(served.server.dataplane, HttpLimits()).handler(exchange)
        await exchange.ended.wait()
        return exchange

    return asyncio.run_coroutine_threadsafe(run(), served.loop).result(20)


def test_a_stream_is_lines(page: ModuleType, served: RunningServer) -> None:
    exchange = ask(page, served, beginning=say(text="upon a time"), length=8, stream=True)
    assert exchange.headers["Content-Type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in exchange.written.splitlines()]
    assert "".join(line["text"] for line in lines[:-1]) == "upon a time"
    assert len(lines) > 2
    assert lines[-1] == {"end": "stop", "tokens": 3}


def test_a_whole_answer_is_one_document(page: ModuleType, served: RunningServer) -> None:
    (response,) = ask(page, served, beginning=say(text="upon a time"), length=8).responses
    assert (response.status, json.loads(response.body[0])) == (
        200,
        {"story": "upon a time", "end": "stop", "tokens": 3},
    )


@pytest.mark.parametrize(
    ("body", "status", "member"),
    [
        ({"beginning": 1}, 400, "beginning"),
        ({}, 400, "beginning"),
        ({"beginning": "a", "length": 0}, 400, "length"),
        ({"beginning": "a", "model": "none"}, 404, None),
    ],
)
def test_errors_have_the_form_of_the_page(
    page: ModuleType, served: RunningServer, body: dict[str, Any], status: int, member: str | None
) -> None:
    (response,) = ask(page, served, **body).responses
    document = json.loads(response.body[0])
    assert (response.status, document["member"]) == (status, member)
    assert document["error"]


def test_a_later_error_is_the_last_line(page: ModuleType, served: RunningServer) -> None:
    exchange = ask(page, served, beginning=say(text="upon a time", error=2), stream=True)
    lines = [json.loads(line) for line in exchange.written.splitlines()]
    assert [set(line) for line in lines] == [{"text"}, {"text"}, {"error", "member"}]
