"""Callers beside each other over both protocols: fair queues, quotas, and refusals that say when to return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from support.async_clients import AsyncClient
from support.clients import ClientError
from support.gate import BACKEND_DIRECTORY, GatedModel, until, write_gated
from support.keys import KeyFile
from support.repositories import write_model
from support.sequences import write_sequence_model
from support.serving import RunningServer, running_server

from modelserver.auth.api_keys import Scope
from modelserver.auth.caller_limits import CallerLimits
from modelserver.pb import grpc_service_pb2 as pb

DATA = np.array([[1, 2]], np.int32)
TOO_MANY = ("429", "StatusCode.RESOURCE_EXHAUSTED")
QUEUE = "dynamic_batching { default_queue_policy { max_queue_size: 6 } }"
LIMITS = {
    "hog": CallerLimits(),
    "guest": CallerLimits(weight=2.0),
    "once_http": CallerLimits(requests_per_second=0.001),
    "once_grpc": CallerLimits(requests_per_second=0.001),
    "single": CallerLimits(concurrent=1),
    "changing": CallerLimits(requests_per_second=0.001),
}


@pytest.fixture(scope="module")
def keys(layout: str, tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    file = KeyFile(tmp_path_factory.mktemp("keys") / "keys.yaml")
    for name, limits in LIMITS.items():
        file.add(name, Scope.INFER, limits=limits)
    return file


def write_models(root: Path) -> Path:
    for protocol in ("http", "grpc"):
        write_gated(root, f"gated_{protocol}", max_batch_size=1, more=QUEUE)
        write_sequence_model(root, f"slots_{protocol}", "direct { }", max_batch_size=1)
    write_model(root, "plain")
    return root


@pytest.fixture(scope="module")
def shared(layout: str, tmp_path_factory: pytest.TempPathFactory, keys: KeyFile) -> Iterator[RunningServer]:
    root = write_models(tmp_path_factory.mktemp("shared"))
    with running_server(root, backend_directory=(BACKEND_DIRECTORY,), api_keys_file=str(keys.path)) as running:
        yield running


@pytest.fixture
async def client(async_protocol: type[AsyncClient], shared: RunningServer) -> AsyncIterator[AsyncClient]:
    async with async_protocol(shared) as connected:
        yield connected


def protocol_of(client: AsyncClient) -> str:
    return "http" if "Http" in type(client).__name__ else "grpc"


def gated(server: RunningServer, client: AsyncClient) -> GatedModel:
    return GatedModel(server, client, f"gated_{protocol_of(client)}")


async def refused(client: AsyncClient, **headers: str) -> ClientError:
    with pytest.raises(ClientError) as caught:
        await client.infer("plain", {"INPUT0": DATA}, headers=headers)
    return caught.value


async def test_who_sends_little_is_served_before_who_sends_much(
    client: AsyncClient, shared: RunningServer, keys: KeyFile
) -> None:
    hog, guest = ({"x-api-key": keys.texts[name]} for name in ("hog", "guest"))
    async with gated(shared, client) as model:
        await model.block(headers=hog)
        for number in range(4):
            await model.send(f"hog {number}", headers=hog)
        await model.send("guest", headers=guest)
        await model.finish()
        order = [ids[0] for ids in model.gate.batches]
        assert order.index("guest") <= 2, order
        assert [name for name in order if name.startswith("hog")] == [f"hog {number}" for number in range(4)]


async def test_a_full_queue_takes_from_who_has_most_in_it(
    client: AsyncClient, shared: RunningServer, keys: KeyFile
) -> None:
    hog, guest = ({"x-api-key": keys.texts[name]} for name in ("hog", "guest"))
    async with gated(shared, client) as model:
        await model.block(headers=hog)
        waiting = [await model.send(f"hog {number}", headers=hog) for number in range(6)]
        with pytest.raises(ClientError, match="Exceeds maximum queue size"):
            await model.start("hog, one too many", headers=hog)
        welcome = model.start("guest", headers=guest)
        with pytest.raises(ClientError, match="Exceeds maximum queue size"):
            await waiting.pop()
        model.gate.release()
        await asyncio.gather(welcome, *waiting)


async def test_slots_of_sequences_are_shared(client: AsyncClient, shared: RunningServer, keys: KeyFile) -> None:
    """One slot, and the hog's sequence in it: of those that wait, the guest's begins before the hog's second one."""
    model = f"slots_{protocol_of(client)}"

    async def send(name: str, number: int, *, is_start: bool = True, is_end: bool = True) -> None:
        await client.infer(
            model,
            {"INPUT": np.ones((1, 1), np.int32)},
            sequence_id=number,
            sequence_start=is_start,
            sequence_end=is_end,
            headers={"x-api-key": keys.texts[name]},
        )

    def depth() -> int:
        return sum(each.queue_depth for each in shared.server.repository.models() if each.name == model)

    await send("hog", 1, is_end=False)
    waiting = []
    for name, number in (("hog", 2), ("hog", 3), ("guest", 4)):
        waiting.append(asyncio.create_task(send(name, number, is_end=name == "hog")))
        await until(lambda: shared.call(depth) == len(waiting), "it waits for a slot")
    await send("hog", 1, is_start=False)
    first, second, guest = waiting
    await asyncio.gather(first, guest)
    assert shared.call(depth) == 1, "the hog's second one waits on"
    await send("guest", 4, is_start=False)
    await second


async def test_requests_per_second_are_counted_by_key(client: AsyncClient, keys: KeyFile) -> None:
    header = {"x-api-key": keys.texts[f"once_{protocol_of(client)}"]}
    await client.infer("plain", {"INPUT0": DATA}, headers=header)
    error = await refused(client, **header)
    assert error.status in TOO_MANY
    assert "0.001 requests per second" in str(error)
    await client.infer("plain", {"INPUT0": DATA}, headers={"x-api-key": keys.texts["hog"]})


async def test_requests_at_a_time_are_counted_by_key(client: AsyncClient, shared: RunningServer, keys: KeyFile) -> None:
    header = {"x-api-key": keys.texts["single"]}
    async with gated(shared, client) as model:
        await model.block(headers=header)
        assert "1 requests at a time" in str(await refused(client, **header))
        await model.finish()
    await client.infer("plain", {"INPUT0": DATA}, headers=header)


def document() -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}]}


def message() -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="INT32", shape=[1, 2])
    request = pb.ModelInferRequest(model_name="plain", inputs=[tensor], raw_input_contents=[DATA.tobytes()])
    return bytes(request.SerializeToString())


def test_a_refusal_says_when_to_return(shared: RunningServer, keys: KeyFile) -> None:
    header = {"x-api-key": keys.texts["changing"]}
    url = f"http://{shared.http_url}/v2/models/plain/infer"
    assert httpx.post(url, json=document(), headers=header).status_code == 200
    answer = httpx.post(url, json=document(), headers=header)
    assert answer.status_code == 429
    assert 900 < int(answer.headers["retry-after"]) <= 1000
    with grpc.insecure_channel(shared.grpc_url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            infer(message(), metadata=tuple(header.items()), timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(caught.value.trailing_metadata())
    assert 900_000 < int(trailers["grpc-retry-pushback-ms"]) <= 1_000_000
    # What the file says now counts, without a restart.
    keys.change("changing", CallerLimits(requests_per_second=1000))
    try:
        shared.call(lambda: shared.server.keys.look())
        assert httpx.post(url, json=document(), headers=header).status_code == 200
    finally:
        keys.change("changing", LIMITS["changing"])


async def test_callers_are_told_apart_by_a_header(
    layout: str, async_protocol: type[AsyncClient], tmp_path: Path
) -> None:
    write_models(tmp_path)
    options = {"callers_by": "header:X-Tenant", "caller_limits": "requests_per_second=0.001"}
    with running_server(tmp_path, backend_directory=(BACKEND_DIRECTORY,), **options) as running:
        async with async_protocol(running) as client:
            for tenant in ("a", "b"):
                await client.infer("plain", {"INPUT0": DATA}, headers={"x-tenant": tenant})
                assert (await refused(client, **{"x-tenant": tenant})).status in TOO_MANY
        page = await asyncio.to_thread(httpx.get, f"http://{running.metrics_url}/metrics")
        assert 'modelserver_caller_requests_total{caller="a",result="requests"} 1\n' in page.text


async def test_callers_are_told_apart_by_address(
    layout: str, async_protocol: type[AsyncClient], tmp_path: Path
) -> None:
    write_models(tmp_path)
    options = {"callers_by": "address", "caller_limits": "concurrent=1"}
    with running_server(tmp_path, backend_directory=(BACKEND_DIRECTORY,), **options) as running:
        async with async_protocol(running) as client, gated(running, client) as model:
            await model.block()
            assert "the quota of '127.0.0.1'" in str(await refused(client))
