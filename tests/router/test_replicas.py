"""Replicas of other kinds and ends: behind TLS, behind a name, and lost in the middle of calls of gRPC."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from support.certificates import Authority
from support.fault_proxy import Fault, fault_proxy
from support.gate import write_gated
from support.model_files import write_identity
from support.routing import running_router
from support.serving import running_server
from support.waiting import until_true

BODY = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


def tensor(dtype: type = np.float32) -> Any:
    made = tritonclient.grpc.InferInput("INPUT0", [1, 2], {np.float32: "FP32", np.int32: "INT32"}[dtype])
    made.set_data_from_numpy(np.ones((1, 2), dtype))
    return made


@pytest.mark.parametrize("knows_replicas", [True, False])
def test_replicas_with_tls_that_ask_for_certificates(tmp_path: Path, knows_replicas: bool) -> None:
    write_identity(tmp_path / "models")
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair, own = authority.pair("server"), authority.pair("router")
    tls = {"tls_cert": str(pair.certificate), "tls_key": str(pair.key), "tls_client_ca": str(authority.certificate)}
    trusted = authority if knows_replicas else other
    names = {"replica_ca": trusted.certificate, "replica_cert": own.certificate, "replica_key": own.key}
    rules = {name: str(path) for name, path in names.items()}
    with (
        running_server(tmp_path / "models", **tls) as server,
        running_router((f"https://{server.http_url}",), own=rules) as router,
    ):
        answer = httpx.post(f"http://{router.http_url}/v2/models/identity/infer", json=BODY, timeout=30)
        if knows_replicas:
            assert answer.json()["outputs"][0]["data"] == [1, 2]
            with tritonclient.grpc.InferenceServerClient(router.grpc_url) as client:
                assert client.infer("identity", [tensor()]).as_numpy("OUTPUT0").tolist() == [[1, 1]]
        else:
            assert answer.status_code == 503
            assert "certificate" in answer.json()["error"]


def test_a_name_leads_to_replicas(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with running_server(tmp_path) as server:
        port = server.http_url.rpartition(":")[2]
        with running_router(discover=f"dns://localhost:{port}") as router:
            answer = httpx.post(f"http://{router.http_url}/v2/models/identity/infer", json=BODY)
            assert answer.json()["outputs"][0]["data"] == [1, 2]


def test_calls_of_grpc_whose_replica_is_lost(tmp_path: Path) -> None:
    """A unary call, and a stream that has answers already: neither may be sent again, and both are told."""
    gate = write_gated(tmp_path, "gated")
    write_identity(tmp_path)
    with (
        running_server(
            tmp_path, backend_directory=(str(Path(__file__).parents[1] / "support" / "backends"),)
        ) as server,
        fault_proxy(server.http_url) as proxy,
        running_router((proxy.address,)) as router,
        tritonclient.grpc.InferenceServerClient(router.grpc_url) as client,
    ):
        gate.hold()
        ends: SimpleQueue[Any] = SimpleQueue()
        client.async_infer("gated", [tensor(np.int32)], lambda result, error: ends.put(error), request_id="held")
        streamed: SimpleQueue[Any] = SimpleQueue()
        client.start_stream(lambda result, error: streamed.put(error or result))
        client.async_stream_infer("identity", [tensor()])
        assert streamed.get(timeout=30).as_numpy("OUTPUT0").tolist() == [[1, 1]]
        until_true(lambda: router.router.replicas.counts.num_active == 2, "both are with the replica")
        proxy.fail(Fault.REFUSE)
        unary, stream = ends.get(timeout=30), streamed.get(timeout=30)
        assert unary.status() == stream.status() == "StatusCode.UNAVAILABLE"
        assert "may have been processed" in unary.message()
        assert "while it answered" in stream.message()
        counts = router.router.replicas.counts
        assert (counts.num_lost, counts.num_broken_streams) == (1, 1)
        gate.release()
        proxy.fail(Fault.NONE)
        client.stop_stream()
        until_true(lambda: client.is_server_ready(), "the replica is back")
        assert client.infer("identity", [tensor()]).as_numpy("OUTPUT0").tolist() == [[1, 1]]


def test_what_others_send_counts(tmp_path: Path) -> None:
    """A replica that works for someone else gets less from this router."""
    gate = write_gated(tmp_path, "gated")
    write_identity(tmp_path)
    backends = (str(Path(__file__).parents[1] / "support" / "backends"),)
    with (
        running_server(tmp_path, backend_directory=backends) as busy,
        running_server(tmp_path, backend_directory=backends) as idle,
        tritonclient.grpc.InferenceServerClient(busy.grpc_url) as elsewhere,
    ):
        gate.hold()
        ends: SimpleQueue[Any] = SimpleQueue()
        for _ in range(8):
            elsewhere.async_infer("gated", [tensor(np.int32)], lambda result, error: ends.put(error))
        until_true(lambda: busy_requests(busy.http_url) == 8, "the requests are there")
        with running_router((f"http://{busy.http_url}", f"http://{idle.http_url}")) as router:
            url = f"http://{router.http_url}/v2/models/identity/infer"
            until_true(lambda: from_others(router.http_url) == [2.0, 0.0], "the router has asked both")
            assert {httpx.post(url, json=BODY).status_code for _ in range(10)} == {200}
            assert requests_served(busy.http_url) == 0
            assert requests_served(idle.http_url) == 10
        gate.release()
        assert [ends.get(timeout=30) for _ in range(8)] == [None] * 8


def busy_requests(address: str) -> int:
    answer = httpx.get(f"http://{address}/v2/health/ready", headers={"accept": "application/json"})
    return int(answer.json()["inflight_requests"])


def from_others(address: str) -> list[float]:
    return [each["from_others"] for each in httpx.get(f"http://{address}/v2/router/endpoints").json()["endpoints"]]


def requests_served(address: str) -> int:
    statistics = httpx.get(f"http://{address}/v2/models/identity/stats").json()["model_stats"][0]
    return int(statistics["inference_count"])
