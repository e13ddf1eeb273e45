"""What routers are told of the replicas of a pool."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.routing import running_router
from support.waiting import until_true

from modelserver.cluster.feed import Feed, FeedEndpoint


@contextmanager
def reading(feed: Feed, pool: str) -> Iterator[http.client.HTTPResponse]:
    parts = urlsplit(feed.url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    try:
        connection.request("GET", f"{parts.path}?pool={pool}")
        yield connection.getresponse()
    finally:
        connection.close()


def answer(feed: Feed, pool: str) -> str:
    with reading(feed, pool) as response:
        return response.read().decode()


def endpoint(port: int, state: str = "ready") -> FeedEndpoint:
    return FeedEndpoint(f"p-{port}", "127.0.0.1", str(port), state, {"version": "1"})


def line(response: http.client.HTTPResponse) -> Any:
    return json.loads(response.readline())


@pytest.fixture
def feed() -> Iterator[Feed]:
    feed = Feed("127.0.0.1", 0)
    yield feed
    feed.close()


def test_each_change_of_a_pool_is_a_line(feed: Feed) -> None:
    with reading(feed, "p") as response:
        assert (response.status, response.read()) == (503, b'{"error":"the replicas are not known yet"}')
    feed.publish({"p": [endpoint(1)], "q": []})
    until_true(lambda: "the pools are: p, q" in answer(feed, "none"), "the pools are known")
    with reading(feed, "p") as response:
        first = line(response)
        assert first["endpoints"] == [
            {"name": "p-1", "address": "127.0.0.1", "port": "1", "state": "ready", "labels": {"version": "1"}}
        ]
        feed.publish({"p": [endpoint(1, "draining")], "q": []})
        second = line(response)
        assert second["endpoints"][0]["state"] == "draining"
        assert second["generation"] > first["generation"]
        feed.publish({"q": []})  # the pool has gone, and its stream ends
        assert response.read().strip() == b""


def test_a_router_follows_it(feed: Feed) -> None:
    feed.publish({"p": [endpoint(1)]})
    with running_router(discover=f"{feed.url}?pool=p") as router:
        until_true(lambda: "127.0.0.1:1," in str(router.router.endpoints.endpoints), "the first is known")
        feed.publish({"p": [endpoint(2)]})
        until_true(lambda: "127.0.0.1:2," in str(router.router.endpoints.endpoints), "the second is known")
        assert len(router.router.endpoints) == 1
