from __future__ import annotations

import json
from typing import Any, cast

import pytest
from support.echo import EchoModel, echo_dataplane
from support.http_calls import ask_now

from modelserver.app.frontends import http_frontend
from modelserver.core.datatype import Datatype
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.frontends.http.kserve import EXTENSIONS
from modelserver.planes.data import DataPlane


@pytest.fixture
def model() -> EchoModel:
    return EchoModel("echo", Datatype.FP32, dims=(4,), max_batch_size=8, version=2)


@pytest.fixture
def dataplane(model: EchoModel) -> DataPlane:
    return echo_dataplane(model, EchoModel("other"))


@pytest.fixture
def frontend(dataplane: DataPlane) -> HttpFrontend:
    return http_frontend(dataplane, cast("Any", None))


JSON = {"accept": "application/json"}


def test_health(frontend: HttpFrontend) -> None:
    live = ask_now(frontend, "GET", "/v2/health/live")
    ready = ask_now(frontend, "GET", "/v2/health/ready")
    assert (live.status, live.body) == (200, b"")
    assert (ready.status, ready.body) == (200, b"")


@pytest.mark.parametrize("accept", ["application/json", "text/html, Application/JSON;q=0.5"])
@pytest.mark.parametrize("word", ["live", "ready"])
def test_health_is_told_in_json_to_who_asks_for_it(frontend: HttpFrontend, word: str, accept: str) -> None:
    answer = ask_now(frontend, "GET", f"/v2/health/{word}", headers={"accept": accept})
    assert (answer.status, answer.json()) == (200, {word: True} | ({"inflight_requests": 0} if word == "ready" else {}))


def test_not_ready_without_all_models(frontend: HttpFrontend, dataplane: DataPlane) -> None:
    cast("Any", dataplane)._repository.is_complete = False
    answer = ask_now(frontend, "GET", "/v2/health/ready")
    assert (answer.status, answer.body) == (400, b"")
    answer = ask_now(frontend, "GET", "/v2/health/ready", headers=JSON)
    expected = {"ready": False, "state": "degraded", "reasons": ["a model does not serve"], "inflight_requests": 0}
    assert (answer.status, answer.json()) == (400, expected)


def test_readiness_falls_and_liveness_stays_while_shutting_down(frontend: HttpFrontend, dataplane: DataPlane) -> None:
    dataplane.begin_shutdown()
    answer = ask_now(frontend, "GET", "/v2/health/ready", headers=JSON)
    expected = {"ready": False, "state": "stopping", "reasons": ["the server is shutting down"], "inflight_requests": 0}
    assert (answer.status, answer.json()) == (503, expected)
    assert ask_now(frontend, "GET", "/v2/health/live").status == 200
    assert ask_now(frontend, "POST", "/v2/models/echo/infer", b'{"inputs":[]}').status == 503


@pytest.mark.parametrize("path", ["/v2", "/v2/"])
def test_server_metadata(frontend: HttpFrontend, path: str) -> None:
    assert ask_now(frontend, "GET", path).json() == {
        "name": "modelserver",
        "version": "1.2.3",
        "extensions": ["statistics", "model_configuration"],
    }


def test_model_list(frontend: HttpFrontend) -> None:
    assert ask_now(frontend, "GET", "/v2/models").json() == {"models": ["echo", "other"]}


@pytest.mark.parametrize("path", ["/v2/models/echo", "/v2/models/echo/", "/v2/models/echo/versions/2"])
def test_model_metadata(frontend: HttpFrontend, path: str) -> None:
    assert ask_now(frontend, "GET", path).json() == {
        "name": "echo",
        "versions": ["2"],
        "platform": "echo",
        "inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "OUTPUT", "datatype": "FP32", "shape": [-1, 4]}],
    }


@pytest.mark.parametrize("path", ["/v2/models/echo/ready", "/v2/models/echo/versions/2/ready"])
def test_model_ready(frontend: HttpFrontend, model: EchoModel, path: str) -> None:
    assert (ask_now(frontend, "GET", path).status, ask_now(frontend, "GET", path).body) == (200, b"")
    answer = ask_now(frontend, "GET", path, headers=JSON)
    assert (answer.status, answer.json()) == (200, {"name": "echo", "ready": True})
    model.ready = False
    answer = ask_now(frontend, "GET", path)
    assert answer.status == 400
    assert answer.json() == {"name": "echo", "ready": False, "error": "Model version not ready"}


@pytest.mark.parametrize("path", ["/v2/models/echo/config", "/v2/models/echo/versions/2/config"])
def test_model_config(frontend: HttpFrontend, path: str) -> None:
    config = ask_now(frontend, "GET", path).json()
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("echo", "echo", 8)
    assert config["input"][0]["data_type"] == "TYPE_FP32"


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v2/models/stats", ["echo", "other"]),
        ("/v2/models/echo/stats", ["echo"]),
        ("/v2/models/echo/versions/2/stats", ["echo"]),
    ],
)
def test_statistics(frontend: HttpFrontend, path: str, names: list[str]) -> None:
    rows = ask_now(frontend, "GET", path).json()["model_stats"]
    assert [row["name"] for row in rows] == names


@pytest.mark.parametrize("suffix", ["", "/ready", "/config", "/stats", "/infer"])
@pytest.mark.parametrize("target", ["/nobody", "/echo/versions/7", "/echo/versions/v2", "/echo/versions/-1", "/e%2Fo"])
def test_unknown_models_and_versions(frontend: HttpFrontend, target: str, suffix: str) -> None:
    method = "POST" if suffix == "/infer" else "GET"
    answer = ask_now(frontend, method, f"/v2/models{target}{suffix}", b'{"inputs":[]}')
    assert answer.status == 404
    assert "unknown model" in answer.error


@pytest.mark.parametrize("version", ["9" * 30, "٣"])
def test_absurd_versions_are_not_found(frontend: HttpFrontend, version: str) -> None:
    assert ask_now(frontend, "GET", f"/v2/models/echo/versions/{version}").status == 404


@pytest.mark.parametrize("path", ["/v3", "/v3/models/echo", "/v2/model", "/v2/models/echo/infer/x", "/v2//models", "*"])
def test_unknown_paths(frontend: HttpFrontend, path: str) -> None:
    answer = ask_now(frontend, "GET", path)
    assert answer.status == 404
    assert "Not Found" in answer.error


def test_an_unknown_path_is_told_the_nearest_route(frontend: HttpFrontend) -> None:
    assert "did you mean /v2/health/ready?" in ask_now(frontend, "GET", "/v2/helth/ready").error


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v2", "GET, HEAD"),
        ("GET", "/v2/models/echo/infer", "POST"),
        ("HEAD", "/v2/models/echo/infer", "POST"),
        ("GET", "/v2/repository/index", "POST"),
        ("DELETE", "/v2/logging", "GET, HEAD, POST"),
    ],
)
def test_wrong_methods(frontend: HttpFrontend, method: str, path: str, allow: str) -> None:
    answer = ask_now(frontend, method, path)
    assert (answer.status, answer.headers["allow"]) == (405, allow)
    assert method in answer.error


def test_head_is_served_where_get_is(frontend: HttpFrontend) -> None:
    assert ask_now(frontend, "HEAD", "/v2/health/live").status == 200


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_there_are_no_regions(frontend: HttpFrontend, kind: str) -> None:
    assert ask_now(frontend, "GET", f"/v2/{kind}sharedmemory/status").json() == []
    assert ask_now(frontend, "POST", f"/v2/{kind}sharedmemory/unregister").status == 200
    answer = ask_now(frontend, "GET", f"/v2/{kind}sharedmemory/region/r/status")
    assert (answer.status, answer.error) == (404, f"Unable to find {kind} shared memory region: 'r'")
    for verb in ("register", "unregister"):
        assert ask_now(frontend, "POST", f"/v2/{kind}sharedmemory/region/r/{verb}", b"{}").status == 501


def test_what_is_there_is_advertised_in_tritons_order() -> None:
    of_triton = (
        "classification sequence model_repository model_repository(unload_dependents) schedule_policy "
        "model_configuration system_shared_memory cuda_shared_memory binary_tensor_data parameters "
        "statistics trace logging"
    )
    assert list(EXTENSIONS) == of_triton.split()


def test_a_fault_of_ours_is_a_500(frontend: HttpFrontend, dataplane: DataPlane) -> None:
    cast("Any", dataplane)._metadata = None
    answer = ask_now(frontend, "GET", "/v2")
    assert answer.status == 500
    assert json.loads(answer.body)["error"]
