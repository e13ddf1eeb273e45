"""Clients that leave, or read slowly: what was begun for them ends, or waits."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.layouts import ADDRESS, LAYOUTS, layout
from support.mock_llm import say, user, write_mock_llm
from support.serving import RunningServer, running_server
from support.waiting import until_true

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module", params=LAYOUTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server in each layout of ports and processes."""
    root = tmp_path_factory.mktemp("served")
    write_mock_llm(root, "mock")
    write_mock_llm(root, "other")
    with layout(request.param), running_server(root) as running:
        yield running


def num_inflight(served: RunningServer) -> int:
    return served.server.repository.get("mock", None).inflight


def send(served: RunningServer, path: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody reads yet."""
    connection = socket.create_connection((ADDRESS, served.server.http_port))
    text = json.dumps({"model": "mock", **body})
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    connection.sendall((head + text).encode())
    return connection


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_client_that_leaves_cancels_all_that_it_asked(served: RunningServer, path: str, is_streamed: bool) -> None:
    hang = say(text="a b c", hang=1)
    body = {"messages": user(hang)} if path == CHAT else {"prompt": [hang, hang, hang]}
    with send(served, path, {**body, "stream": is_streamed}) as connection:
        until_true(lambda: num_inflight(served) == (1 if path == CHAT else 3), "the model has the requests")
        if is_streamed:
            assert connection.recv(12) == b"HTTP/1.1 200"
    until_true(lambda: num_inflight(served) == 0, "they were cancelled")


def test_an_endless_stream_ends_with_its_client(served: RunningServer) -> None:
    with openai.OpenAI(base_url=f"http://{served.http_url}/v1", api_key="none") as client:
        with client.chat.completions.create(
            model="mock",
            messages=user(say(text="", endless=True)),  # type: ignore[arg-type]
            stream=True,
        ) as stream:
            for _ in range(300):
                next(iter(stream))
        until_true(lambda: num_inflight(served) == 0, "the stream was cancelled")


def test_a_slow_reader_makes_the_model_wait(served: RunningServer) -> None:
    """An endless stream that nobody reads fills what lies between and stops; other models serve meanwhile."""
    with send(served, CHAT, {"messages": user(say(text="x" * 20_000, endless=True)), "stream": True}):
        until_true(lambda: stands_still(served), "the model waits", interval_s=0.3)
        answer = httpx.post(
            f"http://{served.http_url}{COMPLETIONS}", json={"model": "other", "prompt": "a"}, timeout=20
        )
        assert answer.json()["choices"][0]["text"] == "a"
    until_true(lambda: num_inflight(served) == 0, "the stream was cancelled")


_seen: dict[int, int] = {}


def stands_still(served: RunningServer) -> bool:
    """Whether no more responses came from the model since this was asked last."""
    model = served.server.repository.get("mock", None)
    stats = served.call(lambda: model.statistics.snapshot().response_stats)
    count = sum(stat.success.count for stat in stats.values())
    before, _seen[id(served)] = _seen.get(id(served), 0), count
    return count == before > 1


async def test_many_streams_at_once_on_every_layout(served: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{served.http_url}/v1", api_key="none", max_retries=0) as client:

        async def ask(number: int) -> str:
            stream = await client.chat.completions.create(
                model="mock",
                messages=user(f"this is number {number}"),
                stream=True,  # type: ignore[arg-type]
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*(ask(number) for number in range(30)))
    assert texts == [f"this is number {number}" for number in range(30)]
    assert num_inflight(served) == 0


def test_a_server_that_stops_lets_streams_end(tmp_path: Path) -> None:
    write_mock_llm(tmp_path, "mock")
    with running_server(tmp_path) as server:
        connection = send(server, CHAT, {"messages": user(say(text="a b c", pause=0.1)), "stream": True})
        until_true(lambda: num_inflight(server) == 1, "the model has the request")
    with connection:
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert b"[DONE]" in answer
