"""Overload under --overload-statuses, and the timeouts of queue policies, over both protocols."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator

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
