"""Canaries and shadows over both protocols: weights, stickiness, copies that are compared, and how they are set."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from support.async_clients import AsyncClient
from support.gate import until
from support.repositories import write_model
from support.serving import RunningServer, running_server

from modelserver.pb import grpc_service_pb2 as pb

pytestmark = pytest.mark.one_layout

DATA = np.array([[1, 2]], np.int32)
ALL = "version_policy { all { } }\n"
PYTHON = """
backend: "python"
input [ { name: "INPUT0", data_type: TYPE_INT32, dims: [ -1 ] } ]
output [ { name: "OUTPUT0", data_type: TYPE_INT32, dims: [ -1 ] } ]
max_batch_size: 8
version_policy { all { } }
"""
CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            data = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if {number} == 3:
                raise RuntimeError("broken version")
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", data + {plus})]))
        return answers
"""


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root: Path = tmp_path_factory.mktemp("served")
    for protocol in ("http", "grpc"):
        write_model(root, f"plain_{protocol}", versions=(1, 2, 3), extra=ALL)
        for number, plus in ((1, 0), (2, 0), (3, 0), (4, 1)):
            directory = write_model(root, f"shadowed_{protocol}", versions=(number,), config=PYTHON) / str(number)
            (directory / "model.py").write_text(CODE.format(number=number, plus=plus))
    options: dict[str, Any] = {"http_header_forward_pattern": "x-user", "grpc_header_forward_pattern": "x-user"}
    with running_server(root, callers_by="header:x-tenant", **options) as running:
        yield running


@pytest.fixture
async def client(async_protocol: type[AsyncClient], served: RunningServer) -> AsyncIterator[AsyncClient]:
    async with async_protocol(served) as connected:
        yield connected


def named(client: AsyncClient, name: str) -> str:
    return f"{name}_{'http' if 'Http' in type(client).__name__ else 'grpc'}"


@contextlib.contextmanager
def traffic(server: RunningServer, name: str, document: dict[str, Any]) -> Iterator[str]:
    """Set a model's traffic while the block runs."""
    url = f"http://{server.http_url}/v2/repository/models/{name}/traffic"
    answer = httpx.post(url, json=document)
    assert answer.status_code == 200, answer.text
    try:
        yield url
    finally:
        assert httpx.delete(url).json() == {"name": name}


async def versions(client: AsyncClient, name: str, number: int, **details: Any) -> Counter[str]:
    answers = [await client.infer(name, {"INPUT0": DATA}, **details) for _ in range(number)]
    return Counter(answer.model_version for answer in answers)


def shares(url: str) -> dict[str, float]:
    found: dict[str, float] = httpx.get(url).json()["shares"]
    return found


async def test_versions_share_requests_by_weight(client: AsyncClient, served: RunningServer) -> None:
    name = named(client, "plain")
    with traffic(served, name, {"weights": {"1": 3, "2": 1}}) as url:
        assert await versions(client, name, 20) == {"1": 15, "2": 5}
        assert shares(url) == {"1": 0.75, "2": 0.25}
        assert await versions(client, name, 4, version="3") == {"3": 4}, "who names a version gets it"
    assert await versions(client, name, 4) == {"3": 4}


@pytest.mark.parametrize(("sticky_by", "header"), [("caller", "x-tenant"), ("parameter:x-user", "x-user")])
async def test_callers_stay_with_their_version(
    client: AsyncClient, served: RunningServer, sticky_by: str, header: str
) -> None:
    name = named(client, "plain")
    with traffic(served, name, {"weights": {"1": 1, "2": 1}, "sticky_by": sticky_by}):
        seen = [await versions(client, name, 3, headers={header: f"user{user}"}) for user in range(12)]
        assert all(len(counts) == 1 for counts in seen)
        assert len({*map(tuple, seen)}) == 2, "and not all with the same"


def shadow_counts(url: str) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = httpx.get(url).json()["shadow_counts"]
    return counts


async def test_shadows_are_compared_and_seen_by_nobody(client: AsyncClient, served: RunningServer) -> None:
    name = named(client, "shadowed")
    shadows = {"2": 1.0, "3": 0.5, "4": 1.0}
    with traffic(served, name, {"weights": {"1": 1}, "shadows": shadows, "tolerance": 0}) as url:
        assert await versions(client, name, 10) == {"1": 10}
        expected = {"2": {"equal": 10}, "3": {"failed": 5}, "4": {"different": 10}}
        await until(lambda: shadow_counts(url) == expected, "all copies were compared")
        page = await asyncio.to_thread(lambda: httpx.get(f"http://{served.metrics_url}/metrics").text)
        sample = f'modelserver_shadow_requests_total{{model="{name}",result="different",version="4"}} 10'
        assert sample in page
        assert f'modelserver_traffic_weight{{model="{name}",version="1"}} 1' in page


def test_what_is_wrong_is_said(served: RunningServer) -> None:
    url = f"http://{served.http_url}/v2/repository/models/plain_http/traffic"
    assert httpx.get(url).json() == {"name": "plain_http"}
    assert httpx.delete(url).status_code == 404
    assert "all weights are 0" in httpx.post(url, json={"weights": {"1": 0}}).json()["error"]
    assert "--override-directory" in httpx.post(url, json={"weights": {"1": 1}, "persist": True}).json()["error"]
    assert httpx.post(url, json={"weights": {"1": 1}, "persist": 1}).status_code == 400
    assert httpx.post(url.replace("plain_http", "none"), json={"weights": {"1": 1}}).status_code == 404
    absent = httpx.post(url, json={"weights": {"1": 1, "7": 1}})
    assert absent.status_code == 400
    assert absent.json()["error"].endswith("model 'plain_http' has no version 7; there are: 1, 2, 3")


def test_grpc_says_the_same(served: RunningServer) -> None:
    with grpc.insecure_channel(served.grpc_url) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/RepositoryModelTraffic",
            pb.RepositoryModelTrafficRequest.SerializeToString,
            pb.RepositoryModelTrafficResponse.FromString,
        )
        asked = pb.ModelTraffic(weights={1: 9, 2: 1}, sticky_by="caller", shadows={3: 0.5}, tolerance=0.5)
        answer = call(pb.RepositoryModelTrafficRequest(model_name="plain_grpc", traffic=asked), timeout=10)
        assert answer.traffic == asked
        assert answer.shares == {1: 0.9, 2: 0.1}
        assert call(pb.RepositoryModelTrafficRequest(model_name="plain_grpc"), timeout=10).traffic == asked
        gone = call(pb.RepositoryModelTrafficRequest(model_name="plain_grpc", remove=True), timeout=10)
        assert not gone.HasField("traffic")
        for wrong in (pb.ModelTraffic(), pb.ModelTraffic(weights={7: 1})):
            with pytest.raises(grpc.RpcError) as caught:
                call(pb.RepositoryModelTrafficRequest(model_name="plain_grpc", traffic=wrong), timeout=10)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
