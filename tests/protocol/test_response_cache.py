"""The response cache as clients meet it: what is executed, what is not, and what the server says of that."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from support.async_clients import AsyncClient
from support.clients import ClientError
from support.gate import BACKEND_DIRECTORY, gate_of, until, write_gated
from support.serving import RunningServer, running_server

from modelserver.cache.store import NO_CACHE_PARAMETER
from modelserver.errors import ErrorCode

pytestmark = pytest.mark.one_layout

CACHED = "response_cache { enable: true }"
MODELS = {
    "cached": CACHED,
    "other": CACHED,
    "batched": f"{CACHED} dynamic_batching {{ }}",
    "plain": "",
    "full": f"{CACHED} dynamic_batching {{ default_queue_policy {{ max_queue_size: 1 }} }}",
}


@pytest.fixture(scope="module")
def gated(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("cached")
    for name, more in MODELS.items():
        write_gated(root, name, more=more)
    with running_server(
        root,
        backend_directory=(BACKEND_DIRECTORY,),
        cache_config=("local,size=1000000",),
        model_control_mode="explicit",
        load_model=("*",),
    ) as running:
        yield running


@pytest.fixture
async def client(async_protocol: type[AsyncClient], gated: RunningServer) -> AsyncIterator[AsyncClient]:
    for name in MODELS:
        renew(gated, name)
        gate_of(name).hold()
        gate_of(name).release()
    async with async_protocol(gated) as connected:
        yield connected


def renew(running: RunningServer, name: str) -> None:
    """Unload and load a model, so that nothing is known of it."""
    running.call(lambda: running.server.controlplane.unload(name))
    running.call(lambda: running.server.controlplane.load(name))


def data(*values: int) -> dict[str, np.ndarray]:
    return {"INPUT0": np.array([values], np.int32)}


async def test_an_equal_request_is_not_executed_again(client: AsyncClient) -> None:
    first = await client.infer("cached", data(1, 2), request_id="a")
    again = await client.infer("cached", data(1, 2), request_id="b")
    assert first.outputs["OUTPUT0"].tolist() == again.outputs["OUTPUT0"].tolist() == [[1, 2]]
    assert again.id == "b"
    assert gate_of("cached").batches == [("a",)]


@pytest.mark.parametrize(
    "other",
    [
        {"inputs": data(1, 3)},
        {"inputs": {"INPUT0": np.array([[1], [2]], np.int32)}},
        {"name": "other"},
        {"parameters": {"mode": 1}},
        {"parameters": {"mode": True}},
        {"parameters": {NO_CACHE_PARAMETER: True}},
    ],
    ids=["bytes", "shape", "model", "int parameter", "bool parameter", "no cache"],
)
async def test_another_request_is_executed(client: AsyncClient, other: dict[str, object]) -> None:
    await client.infer("cached", data(1, 2), request_id="a")
    arguments = {"name": "cached", "inputs": data(1, 2), **other}
    name = str(arguments.pop("name"))
    answer = await client.infer(name, request_id="b", **arguments)  # type: ignore[arg-type]
    np.testing.assert_array_equal(answer.outputs["OUTPUT0"], arguments["inputs"]["INPUT0"])  # type: ignore[index]
    assert ("b",) in gate_of(name).batches


async def test_equal_requests_at_a_time_are_executed_once(client: AsyncClient, gated: RunningServer) -> None:
    gate = gate_of("batched")
    gate.hold()
    model = gated.server.repository.get("batched", None)
    tasks = [asyncio.create_task(client.infer("batched", data(7), request_id=str(number))) for number in range(6)]
    await until(lambda: model.inflight == 6, "all were accepted")
    gate.release()
    answers = await asyncio.gather(*tasks)
    assert [answer.outputs["OUTPUT0"].tolist() for answer in answers] == [[[7]]] * 6
    assert [answer.id for answer in answers] == [str(number) for number in range(6)]
    assert sum(len(batch) for batch in gate.batches) == 1


async def test_a_reload_begins_anew(client: AsyncClient, gated: RunningServer) -> None:
    await client.infer("cached", data(5), request_id="a")
    await asyncio.to_thread(renew, gated, "cached")
    await client.infer("cached", data(5), request_id="b")
    assert gate_of("cached").batches == [("a",), ("b",)]


async def test_a_failure_is_not_kept(client: AsyncClient, gated: RunningServer) -> None:
    gate = gate_of("full")
    gate.hold()
    model = gated.server.repository.get("full", None)
    first = asyncio.create_task(client.infer("full", data(1), request_id="a"))
    await until(lambda: gate.batches == [("a",)], "the first executes")
    second = asyncio.create_task(client.infer("full", data(2), request_id="b"))
    await until(lambda: model.inflight == 2, "the second waits")
    with pytest.raises(ClientError, match="maximum queue size") as caught:
        await client.infer("full", data(3), request_id="c")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    gate.release()
    await asyncio.gather(first, second)
    answer = await client.infer("full", data(3), request_id="d")
    assert answer.outputs["OUTPUT0"].tolist() == [[3]]
    assert ("d",) in gate.batches


async def test_statistics_and_metrics_tell_hits_from_misses(client: AsyncClient, gated: RunningServer) -> None:
    for _ in range(3):
        await client.infer("cached", data(9))
    numbers = gated.server.repository.get("cached", None).statistics.snapshot()
    assert (numbers.cache_hit.count, numbers.cache_miss.count) == (2, 1)
    assert (numbers.success.count, numbers.queue.count, numbers.compute_infer.count) == (3, 3, 1)
    assert (numbers.inference_count, numbers.execution_count) == (1, 1)
    assert numbers.cache_hit.ns > 0
    assert numbers.cache_miss.ns > 0
    page = await asyncio.to_thread(_read, f"http://{gated.metrics_url}/metrics")
    assert 'nv_cache_num_hits_per_model{model="cached",version="1"} 2' in page
    assert 'nv_cache_num_misses_per_model{model="cached",version="1"} 1' in page
    assert 'nv_cache_num_hits_per_model{model="plain"' not in page
    assert re.search(r"^nv_cache_num_entries [1-9]", page, re.MULTILINE)


def _read(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        text: str = answer.read().decode()
    return text
