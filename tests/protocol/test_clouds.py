"""SageMaker's and Vertex AI's endpoints, on ports of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.keys import KeyFile
from support.model_files import write_identity
from support.serving import running_server

from modelserver.app.ports import SAGEMAKER, VERTEX_AI
from modelserver.auth.access import Admitted
from modelserver.auth.api_keys import KeyRing, Scope
from modelserver.errors import InvalidArgumentError
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.options.server_options import ServerOptions
from modelserver.protocol.exchange import HttpHead
from modelserver.protocol.response import HttpResponse

DATA = np.array([[1, 2.5]], np.float32)
DOCUMENT = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}]}
BINARY_HEAD = (
    b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}}],'
    b'"parameters":{"binary_data_output":true}}'
)


@pytest.fixture(params=["sagemaker", "vertex-ai"])
def cloud(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A client of one cloud's port over two models, of which `echo` is named; and its paths."""
    write_identity(tmp_path, "echo")
    write_identity(tmp_path, "other")
    is_vertex = request.param == "vertex-ai"
    if is_vertex:
        monkeypatch.setenv("AIP_HEALTH_ROUTE", "/health")
        monkeypatch.setenv("AIP_PREDICT_ROUTE", "/v1/predict")
        options: dict[str, Any] = {"allow_vertex_ai": True, "vertex_ai_port": 0, "vertex_ai_default_model": "echo"}
    else:
        monkeypatch.setenv("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "echo")
        options = {"allow_sagemaker": True, "sagemaker_port": 0}
    with running_server(tmp_path, **options) as running:
        port = running.server.port_of(VERTEX_AI if is_vertex else SAGEMAKER)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            yield {
                "client": client,
                "health": "/health" if is_vertex else "/ping",
                "predict": "/v1/predict" if is_vertex else "/invocations",
                "type": f"application/vnd.{request.param}-triton.binary+json",
            }


def test_health_and_json_inference(cloud: dict[str, Any]) -> None:
    client = cloud["client"]
    assert (client.get(cloud["health"]).status_code, client.get(cloud["health"]).content) == (200, b"")
    answer = client.post(cloud["predict"], json=DOCUMENT)
    assert answer.status_code == 200
    assert answer.json()["model_name"] == "echo"
    assert answer.json()["outputs"][0]["data"] == [1, 2.5]


def test_binary_tensors_by_the_content_type(cloud: dict[str, Any]) -> None:
    headers = {"Content-Type": f"{cloud['type']};json-header-size={len(BINARY_HEAD)}"}
    answer = cloud["client"].post(cloud["predict"], content=BINARY_HEAD + DATA.tobytes(), headers=headers)
    assert answer.status_code == 200
    if "vertex" in cloud["type"]:  # Vertex AI passes on the header that Triton's clients read
        size = answer.headers["inference-header-content-length"]
        assert answer.headers["content-type"] == "application/octet-stream"
    else:
        kind, _, size = answer.headers["content-type"].partition(";json-header-size=")
        assert kind == cloud["type"]
        assert "inference-header-content-length" not in answer.headers
    assert answer.content[int(size) :] == DATA.tobytes()


def test_other_paths_and_methods_are_not_there(cloud: dict[str, Any]) -> None:
    client = cloud["client"]
    assert client.get("/v2").status_code == 404
    answer = client.get(cloud["predict"])
    assert (answer.status_code, "use POST" in answer.json()["error"]) == (405, True)
    assert client.post(cloud["predict"], content=b"{").status_code == 400


def test_a_redirect_reaches_paths_of_v2_on_vertex_ai(cloud: dict[str, Any]) -> None:
    client, predict = cloud["client"], cloud["predict"]

    def ask(target: str, **details: Any) -> httpx.Response:
        return client.post(predict, headers={"X-Vertex-Ai-Triton-Redirect": target}, **details)

    if predict == "/invocations":
        assert ask("v2/models/other/infer", json=DOCUMENT).json()["model_name"] == "echo"
        return
    assert ask("v2/models/other/infer", json=DOCUMENT).json()["model_name"] == "other"
    assert ask("v2/models/other/versions/1").json()["name"] == "other"
    assert ask("/v2").json()["name"] == "triton"
    assert ask("v2/health/live").status_code == 200
    assert [row["name"] for row in ask("v2/repository/index").json()] == ["echo", "other"]
    assert ask("v2/models/echo/config").json()["name"] == "echo"
    assert ask("metrics").status_code == 400
    for control in (
        "v2/repository/models/echo/unload",
        "v2/repository/models/echo/lo%61d/",
        "v2/systemsharedmemory/region/r/register",
        "v2/systemsharedmemory/unregister",
        "v2/cudasharedmemory/region/r/unregister",
    ):
        answer = ask(control, json={})
        assert (answer.status_code, "server's own ports" in answer.json()["error"]) == (403, True), control


@pytest.mark.parametrize(("names", "status"), [(("one-model_1",), 200), (("one", "two"), 400)])
def test_without_a_name_the_only_model_is_asked(tmp_path: Path, names: tuple[str, ...], status: int) -> None:
    for name in names:
        write_identity(tmp_path, name)
    with running_server(tmp_path, allow_sagemaker=True, sagemaker_port=0) as running:
        url = f"http://127.0.0.1:{running.server.port_of(SAGEMAKER)}/invocations"
        answer = httpx.post(url, json=DOCUMENT)
    assert answer.status_code == status
    if status == 400:
        assert "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME" in answer.json()["error"]


@pytest.mark.parametrize("inference_type", ["generate", "generate_stream"])
def test_sagemaker_s_calls_may_be_generate_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inference_type: str
) -> None:
    monkeypatch.setenv("SAGEMAKER_TRITON_INFERENCE_TYPE", inference_type)
    write_identity(tmp_path, "echo")
    with running_server(tmp_path, allow_sagemaker=True, sagemaker_port=0) as running:
        url = f"http://127.0.0.1:{running.server.port_of(SAGEMAKER)}/invocations"
        answer = httpx.post(url, json={"INPUT0": [1, 2.5]})
    assert answer.status_code == 200
    is_stream = inference_type == "generate_stream"
    assert answer.headers["content-type"].partition(";")[0] == (
        "text/event-stream" if is_stream else "application/json"
    )
    assert json.loads(answer.text.removeprefix("data: "))["OUTPUT0"] == [1, 2.5]


def test_an_unknown_type_of_sagemaker_s_calls_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_TRITON_INFERENCE_TYPE", "predict")
    with (
        pytest.raises(InvalidArgumentError, match="must be one of infer, generate, generate_stream, got 'predict'"),
        running_server(tmp_path, allow_sagemaker=True, sagemaker_port=0),
    ):
        pass


def test_vertex_ai_needs_its_paths(tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE"),
        running_server(tmp_path, allow_vertex_ai=True, vertex_ai_port=0),
    ):
        pass


@pytest.mark.parametrize("text", ["9000", "9999-9000", "a-b"])
def test_a_port_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="--sagemaker-safe-port-range expects LOW-HIGH"):
        ServerOptions(sagemaker_safe_port_range=text)


def test_ports_must_be_within_the_safe_range() -> None:
    told = r"The server cannot listen to HTTP requests at port 8000, allowed port range is \[9000, 9999\].*--http-port"
    with pytest.raises(InvalidArgumentError, match=told):
        ServerOptions(allow_sagemaker=True, sagemaker_safe_port_range="9000-9999")
    ServerOptions(allow_sagemaker=True, sagemaker_safe_port_range="8000-8002")


@pytest.mark.parametrize("target", [None, "v2/models/echo/infer", "v2/models/echo/config"])
def test_a_call_passes_the_guard_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str | None) -> None:
    """As often as a call of v2. Wires look at the head too, if the body is not there yet: that is not counted."""
    write_identity(tmp_path / "models", "echo")
    keys = KeyFile(tmp_path / "keys.yaml")
    headers = {"x-api-key": keys.add("user", Scope.INFER)}
    monkeypatch.setenv("AIP_HEALTH_ROUTE", "/health")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/predict")
    looked: list[bool] = []
    caller = KeyRing.caller
    monkeypatch.setattr(KeyRing, "caller", lambda *arguments: looked.append(True) or caller(*arguments))
    check_head = HttpFrontend.check_head

    def check_uncounted(frontend: HttpFrontend, head: HttpHead, peer: str) -> Admitted | HttpResponse:
        num_looked = len(looked)
        try:
            return check_head(frontend, head, peer)
        finally:
            del looked[num_looked:]

    monkeypatch.setattr(HttpFrontend, "check_head", check_uncounted)
    options: dict[str, Any] = {"allow_vertex_ai": True, "vertex_ai_port": 0, "wire_processes": 1}
    with running_server(tmp_path / "models", api_keys_file=str(keys.path), **options) as running:
        port = running.server.port_of(VERTEX_AI)
        counts = []
        for url in (f"http://{running.http_url}/v2/models/echo/infer", f"http://127.0.0.1:{port}/predict"):
            redirect = {} if target is None or "predict" not in url else {"X-Vertex-Ai-Triton-Redirect": target}
            looked.clear()
            answer = httpx.post(url, json=DOCUMENT, headers={**headers, **redirect})
            assert answer.status_code == 200, answer.text
            counts.append(len(looked))
        assert counts == [1, 1]
        refused = httpx.post(
            f"http://127.0.0.1:{port}/predict",
            headers={**headers, "X-Vertex-Ai-Triton-Redirect": "v2/models/echo/stats"},
        )
        assert (refused.status_code, "no scope 'metrics'" in refused.text) == (403, True)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
