"""Models that another server executes, over gRPC and HTTP: as if they were here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.asking import ask, index, infer, is_ready, metric, wait_for
from support.fault_proxy import Fault, FaultProxy, fault_proxy
from support.model_files import write_model
from support.remote_models import write_remote
from support.serving import RunningServer, running_server

PROTOCOLS = ("grpc", "http")


def _url(back: RunningServer, protocol: str) -> str:
    return f"{protocol}://{back.grpc_url if protocol == 'grpc' else back.http_url}"


ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN", data_type: TYPE_FP32, dims: [ -1 ] } ]
output [ { name: "OUT", data_type: TYPE_FP32, dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "grpc_identity" model_version: -1
    input_map { key: "INPUT0" value: "IN" } output_map { key: "OUTPUT0" value: "MID" } },
  { model_name: "http_identity" model_version: -1
    input_map { key: "INPUT0" value: "MID" } output_map { key: "OUTPUT0" value: "OUT" } } ] }
"""


TENSORS = """
max_batch_size: 8
input [ { name: "INPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
output [ { name: "OUTPUT0", data_type: TYPE_FP32, dims: [ -1 ] } ]
"""


@pytest.fixture(scope="module")
def proxies(back: RunningServer) -> Iterator[dict[str, FaultProxy]]:
    with fault_proxy(back.grpc_url) as grpc, fault_proxy(back.http_url) as http:
        yield {"grpc": grpc, "http": http}


@pytest.fixture(scope="module")
def front(
    back: RunningServer, proxies: dict[str, FaultProxy], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("front")
    for protocol in PROTOCOLS:
        url = _url(back, protocol)
        for model in ("identity", "texts", "slow", "shapes", "repeat"):
            write_remote(repository, f"{protocol}_{model}", url, remote_model=model, affinity="none")
        broken = f"{protocol}://{proxies[protocol].address}"
        write_remote(repository, f"{protocol}_pair", f"{broken} {url}", remote_model="identity", health_interval_ms=100)
        write_remote(repository, f"{protocol}_lone", broken, remote_model="slow", fallback="", retries=0)
        write_remote(repository, f"{protocol}_spare", broken, remote_model="slow", fallback="grpc_identity", retries=0)
        write_remote(repository, f"{protocol}_plain", url, remote_model="identity", binary_tensors="false")
    write_model(repository, "both", ENSEMBLE)
    with running_server(repository) as running:
        yield running


@pytest.fixture(autouse=True)
def _mended(proxies: dict[str, FaultProxy]) -> Iterator[None]:
    yield
    for proxy in proxies.values():
        proxy.fail(Fault.NONE)


def _document(url: str, path: str) -> Any:
    status, document = ask(url, "GET", path)
    assert status == 200, document
    return document


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", ["identity", "shapes", "repeat"])
def test_the_config_is_completed_from_the_remote(
    front: RunningServer, back: RunningServer, protocol: str, model: str
) -> None:
    here = _document(front.http_url, f"/v2/models/{protocol}_{model}/config")
    there = _document(back.http_url, f"/v2/models/{model}/config")
    for name in ("max_batch_size", "model_transaction_policy"):
        assert here.get(name) == there.get(name)
    for kind in ("input", "output"):
        assert [(each["name"], each["data_type"], each["dims"]) for each in here[kind]] == [
            (each["name"], each["data_type"], each["dims"]) for each in there[kind]
        ]


@pytest.mark.parametrize("model", ["grpc_identity", "http_identity", "grpc_plain", "http_plain", "grpc_pair"])
def test_requests_are_answered(front: RunningServer, model: str) -> None:
    for value in range(3):
        assert infer(front.http_url, float(value), model) == (200, float(value))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_texts_ids_and_parameters_pass(front: RunningServer, protocol: str) -> None:
    tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [2, 2], "data": ["a", "", "ä" * 300, "\n"]}
    body = json.dumps({"id": "7", "inputs": [tensor], "parameters": {"note": "x", "flag": True, "count": 3}}).encode()
    status, answer = ask(front.http_url, "POST", f"/v2/models/{protocol}_texts/infer", body)
    assert status == 200, answer
    assert answer["id"] == "7"
    assert answer["outputs"][0]["data"] == tensor["data"]
    assert answer["outputs"][0]["shape"] == [2, 2]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_large_tensors_pass(front: RunningServer, protocol: str) -> None:
    values = list(range(600_000))
    tensor = {"name": "INPUT0", "datatype": "INT64", "shape": [len(values)], "data": values}
    status, answer = ask(
        front.http_url, "POST", f"/v2/models/{protocol}_shapes/infer", json.dumps({"inputs": [tensor]}).encode()
    )
    assert status == 200, answer
    assert answer["outputs"][0]["data"] == values


def test_an_ensemble_has_remote_steps(front: RunningServer) -> None:
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [4, 5]}]}).encode()
    status, answer = ask(front.http_url, "POST", "/v2/models/both/infer", body)
    assert (status, answer["outputs"][0]["data"]) == (200, [4.0, 5.0])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_many_responses_come_one_by_one(front: RunningServer, protocol: str) -> None:
    body = json.dumps({"IN": [5, 6, 7], "DELAY": [0, 5, 0], "WAIT": 0}).encode()
    status, content = ask(front.http_url, "POST", f"/v2/models/{protocol}_repeat/generate_stream", body)
    assert status == 200
    events = [json.loads(line[6:]) for line in content.decode().splitlines() if line.startswith("data: ")]
    assert [(event["OUT"], event["IDX"]) for event in events] == [(5, 0), (6, 1), (7, 2)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_error_of_the_remote_is_answered_with_the_name_of_the_endpoint(
    front: RunningServer, back: RunningServer, protocol: str
) -> None:
    body = json.dumps({"IN": [5, 6], "DELAY": [0], "WAIT": 0}).encode()
    status, content = ask(front.http_url, "POST", f"/v2/models/{protocol}_repeat/generate_stream", body)
    text = content.decode() if isinstance(content, bytes) else str(content)
    assert "expected IN and DELAY shape to match" in text
    assert _url(back, protocol) in text
    assert status in (200, 400)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_deadline_is_handed_on(front: RunningServer, protocol: str) -> None:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1]}
    status, answer = ask(
        front.http_url,
        "POST",
        f"/v2/models/{protocol}_slow/infer",
        json.dumps({"inputs": [tensor]}).encode(),
        {"x-envoy-expected-rq-timeout-ms": "50"},
    )
    assert status in (503, 504), answer


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_dead_endpoint_costs_no_request_and_comes_back(
    front: RunningServer, proxies: dict[str, FaultProxy], protocol: str
) -> None:
    model, proxy = f"{protocol}_pair", proxies[protocol]
    label = f'endpoint="{protocol}://{proxy.address}",engine="0",model="{model}"'
    proxy.fail(Fault.REFUSE)
    for value in range(30):
        assert infer(front.http_url, float(value), model) == (200, float(value))
    up = lambda: metric(front.metrics_url, "remote_endpoint_up", label)  # noqa: E731
    wait_for(lambda: up() == 0, "the probes find the endpoint down")
    proxy.fail(Fault.NONE)
    wait_for(lambda: up() > 0, "the probes find the endpoint up again")
    assert is_ready(front.http_url, model)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_network_that_swallows_everything_is_noticed(
    front: RunningServer, proxies: dict[str, FaultProxy], protocol: str
) -> None:
    assert infer(front.http_url, 1.0, f"{protocol}_lone")[0] == 200
    proxies[protocol].fail(Fault.SWALLOW)
    status, text = infer(front.http_url, 1.0, f"{protocol}_lone")
    assert status == 503
    assert "the endpoint is down: no answer to a probe within 1 s" in text
    assert f"{protocol}://{proxies[protocol].address}" in text
    status, text = infer(front.http_url, 1.0, f"{protocol}_lone")
    assert status == 503
    assert "no endpoint is available" in text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_another_model_answers_for_one_that_is_gone(
    front: RunningServer, proxies: dict[str, FaultProxy], protocol: str
) -> None:
    proxies[protocol].fail(Fault.REFUSE)
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [3, 4]}]}).encode()
    status, answer = ask(front.http_url, "POST", f"/v2/models/{protocol}_spare/infer", body)
    assert (status, answer["outputs"][0]["data"]) == (200, [3.0, 4.0])
    assert answer["parameters"]["x-modelserver-served-by"] == "grpc_identity"


def test_a_model_waits_for_a_remote_that_is_not_there_yet(
    back: RunningServer, proxies: dict[str, FaultProxy], tmp_path: Path
) -> None:
    proxies["grpc"].fail(Fault.REFUSE)
    write_remote(tmp_path, "late", f"grpc://{proxies['grpc'].address}", remote_model="identity")
    write_remote(tmp_path, "round", "grpc://127.0.0.1:1", more=TENSORS)
    with running_server(tmp_path) as late:
        state, reason = index(late.http_url)["late"]
        assert state == "UNAVAILABLE"
        assert "connection refused" in reason
        assert index(late.http_url)["round"][0] == "READY"
        wait_for(lambda: not is_ready(late.http_url, "round"), "the probes find nobody")
        proxies["grpc"].fail(Fault.NONE)
        wait_for(lambda: is_ready(late.http_url, "late"), "the load is tried again")
        assert infer(late.http_url, 2.0, "late") == (200, 2.0)
