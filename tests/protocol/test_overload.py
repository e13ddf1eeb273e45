"""Overload under --overload-statuses, and the timeouts of queue policies, over both protocols."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from support.async_clients import AsyncClient
from support.clients import ClientError
from support.gate import BACKEND_DIRECTORY, GatedModel, write_gated
from support.serving import RunningServer, running_server

MODELS = {
    "full": "dynamic_batching { default_queue_policy { max_queue_size: 1 } }",
    "impatient": "dynamic_batching { default_queue_policy { default_timeout_microseconds: 50000 } }",
    "either": "dynamic_batching { default_queue_policy { "
    "default_timeout_microseconds: 60000000 allow_timeout_override: true } }",
    "levels": "dynamic_batching { priority_levels: 2 default_priority_level: 2 "
    "priority_queue_policy { key: 1 value { default_timeout_microseconds: 50000 } } }",
}
STATUSES = {"http": ("429", "504"), "grpc": ("StatusCode.RESOURCE_EXHAUSTED", "StatusCode.DEADLINE_EXCEEDED")}


@pytest.fixture(scope="module")
def gated(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("gated")
    for name, more in MODELS.items():
        write_gated(root, name, max_batch_size=1, more=more)
    with running_server(root, backend_directory=(BACKEND_DIRECTORY,), overload_statuses=True) as running:
        yield running


@pytest.fixture
async def client(async_protocol: type[AsyncClient], gated: RunningServer) -> AsyncIterator[AsyncClient]:
    async with async_protocol(gated) as connected:
        yield connected


def statuses(client: AsyncClient) -> tuple[str, str]:
    return STATUSES["http" if "Http" in type(client).__name__ else "grpc"]


async def test_a_full_queue_has_a_status_of_its_own(client: AsyncClient, gated: RunningServer) -> None:
    async with GatedModel(gated, client, "full") as model:
        await model.block()
        await model.send("waiting")
        with pytest.raises(ClientError, match="Exceeds maximum queue size") as caught:
            await model.start("refused")
        assert caught.value.status == statuses(client)[0]


async def test_a_timeout_has_a_status_of_its_own(client: AsyncClient, gated: RunningServer) -> None:
    async with GatedModel(gated, client, "impatient") as model:
        await model.block()
        with pytest.raises(ClientError, match="Request timeout expired") as caught:
            await model.start("late")
        assert caught.value.status == statuses(client)[1]


async def test_the_shorter_of_two_timeouts_holds(client: AsyncClient, gated: RunningServer) -> None:
    async with GatedModel(gated, client, "either") as model:
        await model.block()
        began_s = time.monotonic()
        with pytest.raises(ClientError, match="Request timeout expired"):
            await model.start("late", timeout=50_000)
        assert time.monotonic() - began_s < 30


async def test_each_level_has_its_own_timeout(client: AsyncClient, gated: RunningServer) -> None:
    async with GatedModel(gated, client, "levels") as model:
        await model.block()
        patient = await model.send("patient")
        with pytest.raises(ClientError, match="Request timeout expired"):
            await model.start("urgent", priority=1)
        assert not patient.done()


async def test_other_errors_are_as_always(client: AsyncClient) -> None:
    with pytest.raises(ClientError) as caught:
        await client.infer("unknown", {})
    assert caught.value.status in ("404", "400", "StatusCode.NOT_FOUND")


async def test_http_says_when_to_come_again(gated: RunningServer, client: AsyncClient) -> None:
    async with GatedModel(gated, client, "full") as model:
        await model.block()
        await model.send("waiting")
        tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [1]}
        url = f"http://{gated.http_url}/v2/models/full/infer"
        request = urllib.request.Request(url, json.dumps({"inputs": [tensor]}).encode())
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(urllib.request.urlopen, request)
        with caught.value as answer:
            assert (answer.code, answer.headers["Retry-After"]) == (429, "1")


async def test_health_and_control_do_not_wait_for_inference(client: AsyncClient, gated: RunningServer) -> None:
    """Every queue is full and nothing is executed; the server answers all else as if nobody had asked for anything."""
    async with AsyncExitStack() as stack:
        for name in MODELS:
            model = await stack.enter_async_context(GatedModel(gated, client, name))
            await model.block()
        full = GatedModel(gated, client, "full")
        full.start("waiting")
        with pytest.raises(ClientError, match="Exceeds maximum queue size"):
            await asyncio.gather(*(full.start(f"one too many {number}") for number in range(3)))
        for path in ("/v2/health/ready", "/v2/models/full", "/v2/models/stats", "/v2/repository/index"):
            body = b"{}" if path.endswith("index") else None
            assert await asyncio.to_thread(_status, f"http://{gated.http_url}{path}", body) == 200
        assert await asyncio.to_thread(_status, f"http://{gated.metrics_url}/metrics", None) == 200
        assert await client.raw.is_server_ready()
        assert await client.raw.is_model_ready("full")


def _status(url: str, body: bytes | None) -> int:
    with urllib.request.urlopen(url, body, timeout=20) as answer:
        return int(answer.status)


async def test_http_has_the_deadline_that_a_proxy_says(gated: RunningServer, client: AsyncClient) -> None:
    async with GatedModel(gated, client, "either") as model:
        await model.block()
        tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [1]}
        url, headers = f"http://{gated.http_url}/v2/models/either/infer", {"x-envoy-expected-rq-timeout-ms": "30"}
        request = urllib.request.Request(url, json.dumps({"inputs": [tensor]}).encode(), headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            await asyncio.to_thread(urllib.request.urlopen, request, timeout=20)
        with caught.value as answer:
            assert (answer.code, "Request timeout expired" in answer.read().decode()) == (504, True)
