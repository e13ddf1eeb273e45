"""A model that has too much to do, or does not load, costs the other models of its replicas nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.model_files import write_identity
from support.routing import OK, RunningRouter, ScriptedReplica, replicas, running_router
from support.serving import running_server
from support.waiting import until_true

BAD = 'backend: "none"'
BODY = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


def write_models(root: Path, *, is_whole: bool) -> Path:
    write_identity(root, "good")
    if not is_whole:
        (root / "bad" / "1").mkdir(parents=True)
        (root / "bad" / "config.pbtxt").write_text(BAD)
    return root


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRouter]:
    """One replica, one model of which has not loaded."""
    root = write_models(tmp_path_factory.mktemp("models"), is_whole=False)
    with running_server(root) as running, running_router((running.http_url,)) as routing:
        yield routing


def state(router: RunningRouter) -> str:
    (endpoint,) = httpx.get(f"http://{router.http_url}/v2/router/endpoints").json()["endpoints"]
    return str(endpoint["state"])


def test_where_all_replicas_have_a_bad_model_the_others_are_served(router: RunningRouter) -> None:
    until_true(lambda: state(router) == "degraded", "degraded")
    with httpx.Client(base_url=f"http://{router.http_url}") as http:
        assert http.post("/v2/models/good/infer", json=BODY).json()["outputs"][0]["data"] == [1, 2]
        assert "'bad'" in http.post("/v2/models/bad/infer", json=BODY).json()["error"]
        asked = {"accept": "application/json"}
        assert http.get("/v2/health/ready", headers=asked).json() == {"ready": True, "inflight_requests": 0}
        assert http.get("/v2/health/live", headers=asked).json() == {"live": True}


def test_replicas_whose_models_all_serve_are_preferred(tmp_path: Path) -> None:
    bad, good = (write_models(tmp_path / name, is_whole=name == "good") for name in ("bad", "good"))
    with (
        running_server(bad, id="bad") as one,
        running_server(good, id="good") as other,
        running_router((one.http_url, other.http_url)) as router,
        httpx.Client(base_url=f"http://{router.http_url}") as http,
    ):
        until_true(
            lambda: {each.state.value for each in router.router.endpoints.endpoints} == {"ready", "degraded"},
            "both are known",
        )
        assert {http.get("/v2").json()["name"] for _ in range(20)} == {"good"}


def test_health_over_grpc_tells_of_each_model(tmp_path: Path) -> None:
    root = write_models(tmp_path, is_whole=True)
    with (
        running_server(root) as running,
        running_router((running.http_url,)) as router,
        grpc.insecure_channel(router.grpc_url) as channel,
    ):
        until_true(lambda: state(router) == "ready", "ready")
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "good"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == 1
        with pytest.raises(grpc.RpcError) as raised:
            health.Check(health_pb2.HealthCheckRequest(service="none"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def refuse_one(_replica: ScriptedReplica, _connection: socket.socket, request: bytes) -> bytes:
    """As a server does whose model `full` has a full queue."""
    if b"/full/" in request:
        return b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 30\r\ncontent-length: 4\r\n\r\nfull"
    return OK


def test_a_model_that_asks_for_a_pause_does_not_ask_for_its_replica() -> None:
    with (
        replicas(refuse_one) as (replica,),
        running_router((replica.url,)) as router,
        httpx.Client(base_url=f"http://{router.http_url}") as http,
    ):
        for _ in range(3):
            full = http.post("/v2/models/full/infer", content=b"{}")
            assert (full.status_code, full.text, full.headers["retry-after"]) == (503, "full", "30")
            assert http.post("/v2/models/other/infer", content=b"{}").status_code == 200
