"""Models on demand over both protocols: who asks waits, and others do not notice."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.async_clients import AsyncClient
from support.clients import Answer, ClientError
from support.gate import until
from support.repositories import write_model
from support.serving import RunningServer, running_server

DATA = np.array([[1, 2]], np.int32)
NAMES = ("infer", "metadata", "config", "many", "kept", "generated", "stats", "broken")


@pytest.fixture(scope="module")
def lazy(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root: Path = tmp_path_factory.mktemp("lazy")
    for protocol in ("http", "grpc"):
        for name in NAMES:
            write_model(root, f"{name}_{protocol}")
        keep_alive = 'parameters { key: "keep_alive" value { string_value: "0" } }'
        write_model(root, f"restless_{protocol}", extra=keep_alive)
        (root / f"broken_{protocol}" / "config.pbtxt").write_text('backend: "nothing_of_that_name"')
    with running_server(root, load_on_demand=True, model_control_mode="explicit") as running:
        yield running


@pytest.fixture
async def client(async_protocol: type[AsyncClient], lazy: RunningServer) -> AsyncIterator[AsyncClient]:
    async with async_protocol(lazy) as connected:
        yield connected


def named(client: AsyncClient, name: str) -> str:
    return f"{name}_{'http' if 'Http' in type(client).__name__ else 'grpc'}"


def is_loaded(server: RunningServer, name: str) -> bool:
    return server.call(lambda: any(model.name == name for model in server.server.repository.models()))


def get(server: RunningServer, path: str, body: object = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(f"http://{server.http_url}{path}", data, {"Accept": "application/json"})
    with urllib.request.urlopen(call) as answer:
        return dict(json.load(answer))


async def test_inference_loads(client: AsyncClient, lazy: RunningServer) -> None:
    name = named(client, "infer")
    assert not is_loaded(lazy, name)
    answer = await client.infer(name, {"INPUT0": DATA})
    np.testing.assert_array_equal(answer["OUTPUT0"], DATA)
    assert is_loaded(lazy, name)


async def test_all_who_come_meanwhile_are_answered(client: AsyncClient, lazy: RunningServer) -> None:
    name = named(client, "many")
    answers: list[Answer] = await asyncio.gather(*(client.infer(name, {"INPUT0": DATA}) for _ in range(20)))
    assert len(answers) == 20
    assert lazy.call(lambda: lazy.server.repository.load_counts()[name].successes) == 1


async def test_a_model_that_leaves_at_once_answers_everybody(client: AsyncClient, lazy: RunningServer) -> None:
    """It is evicted between any two requests, again and again, and nobody notices."""
    name = named(client, "restless")

    async def ask() -> None:
        for _ in range(6):
            np.testing.assert_array_equal((await client.infer(name, {"INPUT0": DATA}))["OUTPUT0"], DATA)
            await asyncio.sleep(0.03)

    await asyncio.gather(*(ask() for _ in range(3)))
    await until(lambda: not is_loaded(lazy, name), "it left")
    assert lazy.call(lambda: lazy.server.repository.on_demand.counts().evictions[name, "idle"]) >= 1


async def test_a_model_that_cannot_be_loaded_says_why(client: AsyncClient, lazy: RunningServer) -> None:
    name = named(client, "broken")
    with pytest.raises(ClientError, match="nothing_of_that_name"):
        await client.infer(name, {"INPUT0": DATA})
    with pytest.raises(ClientError, match="could not be loaded on demand") as caught:
        await client.infer(name, {"INPUT0": DATA})
    assert caught.value.status in ("503", "StatusCode.UNAVAILABLE")


@pytest.mark.parametrize("what", ["metadata", "config"])
async def test_what_only_a_loaded_model_can_tell_loads_it(async_protocol: type, lazy: RunningServer, what: str) -> None:
    if "Http" in async_protocol.__name__:
        document = get(lazy, f"/v2/models/{what}_http" + ("" if what == "metadata" else "/config"))
        assert document["name"] == f"{what}_http"
        return
    from tritonclient.grpc.aio import InferenceServerClient

    async with InferenceServerClient(lazy.grpc_url) as triton:
        assert await triton.is_model_ready(f"{what}_grpc"), "a model on demand can be asked"
        assert not is_loaded(lazy, f"{what}_grpc"), "and that does not load it"
        call = triton.get_model_metadata if what == "metadata" else triton.get_model_config
        answer = await call(f"{what}_grpc")
        assert (answer.name if what == "metadata" else answer.config.name) == f"{what}_grpc"


def test_the_index_and_readiness_load_nothing(lazy: RunningServer) -> None:
    rows = {row["name"]: row for row in get_rows(lazy)}
    assert rows["stats_http"]["state"] == "UNAVAILABLE"
    assert rows["stats_http"]["reason"] == "not in memory: loaded on demand"
    assert get(lazy, "/v2/models/stats_http/ready") == {"name": "stats_http", "ready": True}
    assert get(lazy, "/v2/health/ready") == {"ready": True, "inflight_requests": 0}
    assert not is_loaded(lazy, "stats_http")


def get_rows(server: RunningServer) -> list[dict[str, str]]:
    with urllib.request.urlopen(f"http://{server.http_url}/v2/repository/index", b"{}") as answer:
        rows: list[dict[str, str]] = json.load(answer)
    return rows


async def test_a_load_over_the_wire_says_how_long(lazy: RunningServer) -> None:
    path = "/v2/repository/models/kept_http/load"
    get(lazy, path, {"parameters": {"keep_alive": "50ms"}})
    await until(lambda: not is_loaded(lazy, "kept_http"), "the model left")
    get(lazy, path, {"parameters": {"keep_alive": -1}})
    assert is_loaded(lazy, "kept_http")
    get(lazy, "/v2/repository/models/kept_http/unload", {"parameters": {"evict": True}})
    assert get(lazy, "/v2/models/kept_http/ready")["ready"]
    for wrong in (True, "soon", "1 parsec"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(lazy, path, {"parameters": {"keep_alive": wrong}})
        with caught.value as answer:
            assert answer.code == 400


async def test_generate_loads(lazy: RunningServer) -> None:
    answer = get(lazy, "/v2/models/generated_http/generate", {"INPUT0": 5})
    assert answer["OUTPUT0"] == 5
