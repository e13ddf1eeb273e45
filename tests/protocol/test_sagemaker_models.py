"""SageMaker's endpoints of several models, on SageMaker's port."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.keys import KeyFile
from support.model_files import write_identity, write_model
from support.serving import RunningServer, running_server

from modelserver.app.ports import SAGEMAKER
from modelserver.auth.api_keys import Scope

pytestmark = pytest.mark.one_layout

DOCUMENT = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2], "data": [1, 2.5]}]}
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling {
  step [ { model_name: "inner" model_version: -1
           input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" } } ]
}
"""
FAILING = """
class TritonPythonModel:
    def execute(self, requests):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
"""
FAILING_CONFIG = """
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
"""


class Agent:
    """What SageMaker's agent does: it puts archives on the disk, and asks."""

    def __init__(self, running: RunningServer, disk: Path) -> None:
        self.running = running
        self.disk = disk
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{running.server.port_of(SAGEMAKER)}", timeout=30)

    def archive(self, name: str) -> Path:
        """The directory in which the archive of this model is unpacked."""
        return self.disk / name / "model"

    def load(self, name: str) -> httpx.Response:
        return self.client.post("/models", json={"model_name": name, "url": str(self.archive(name))})

    def invoke(self, name: str) -> httpx.Response:
        return self.client.post(f"/models/{name}/invoke", json=DOCUMENT)

    def index(self) -> list[str]:
        return [row.name for row in self.running.call(self.running.server.repository.index)]


@pytest.fixture(params=[False, True], ids=["one-space", "namespaces"])
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agent]:
    (tmp_path / "repository").mkdir()
    options: dict[str, Any] = {"allow_sagemaker": True, "sagemaker_port": 0, "model_control_mode": "explicit"}
    with running_server(tmp_path / "repository", **options, model_namespacing=request.param) as running:
        agent = Agent(running, tmp_path / "models")
        with agent.client:
            yield agent


def test_models_come_are_asked_and_go(agent: Agent) -> None:
    for name in ("aa11", "bb22"):
        write_identity(agent.archive(name), f"any-{name}")
    assert agent.client.get("/models").json() == {"models": []}
    assert agent.invoke("aa11").status_code == 404
    for name in ("aa11", "bb22"):
        assert agent.load(name).status_code == 200
    rows = [{"modelName": name, "modelUrl": str(agent.archive(name))} for name in ("aa11", "bb22")]
    assert agent.client.get("/models").json() == {"models": rows}
    assert agent.client.get("/models/bb22").json() == rows[1]
    answer = agent.invoke("aa11")
    assert (answer.status_code, answer.json()["model_name"]) == (200, "aa11")

    assert agent.client.delete("/models/aa11").status_code == 200
    shutil.rmtree(agent.disk / "aa11")
    assert agent.client.get("/models").json() == {"models": rows[1:]}
    for answer in (agent.invoke("aa11"), agent.client.get("/models/aa11"), agent.client.delete("/models/aa11")):
        assert (answer.status_code, "aa11" in answer.json()["error"]) == (404, True)
    assert agent.index() == ["bb22"]
    assert agent.invoke("bb22").status_code == 200

    write_identity(agent.archive("aa11"), "again")
    assert agent.load("aa11").status_code == 200
    assert agent.invoke("aa11").status_code == 200


def test_an_archive_may_be_the_model_itself(agent: Agent) -> None:
    write_identity(agent.disk / "cc33", "model")
    assert agent.load("cc33").status_code == 200
    assert agent.invoke("cc33").json()["model_name"] == "cc33"


def test_an_archive_may_be_an_ensemble_with_its_models(agent: Agent) -> None:
    write_identity(agent.archive("ee55"), "inner")
    write_model(agent.archive("ee55"), "outer", ENSEMBLE)
    assert agent.load("ee55").status_code == 200
    answer = agent.invoke("ee55")
    assert (answer.status_code, answer.json()["outputs"][0]["data"]) == (200, [1, 2.5])
    assert agent.client.delete("/models/ee55").status_code == 200
    assert agent.index() == []
    assert agent.load("ee55").status_code == 200


def test_a_name_is_taken_once(agent: Agent) -> None:
    write_identity(agent.archive("aa11"), "any")
    assert agent.load("aa11").status_code == 200
    answer = agent.load("aa11")
    assert (answer.status_code, "aa11" in answer.json()["error"]) == (409, True)
    assert agent.invoke("aa11").status_code == 200


def test_models_of_two_archives_have_names_of_their_own(agent: Agent) -> None:
    """Without namespaces the second ensemble's model is not told from the first one's, which goes on."""
    for name in ("ee55", "ff66"):
        write_identity(agent.archive(name), "inner")
        write_model(agent.archive(name), "outer", ENSEMBLE)
    assert agent.load("ee55").status_code == 200
    has_namespaces = agent.running.server.options.model_namespacing
    assert agent.load("ff66").status_code == (200 if has_namespaces else 409)
    assert agent.invoke("ee55").status_code == 200
    assert agent.invoke("ff66").status_code == (200 if has_namespaces else 404)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"model_name": "m"}, "url"),
        ({"url": "/tmp"}, "model_name"),
        ({"model_name": 7, "url": "/tmp"}, "model_name"),
        ({"model_name": "../m", "url": "/tmp"}, "model name"),
        ({"model_name": "m", "url": "models/m"}, "absolute"),
        ({"model_name": "m", "url": "/opt/../proc/self"}, "/proc"),
    ],
)
def test_what_makes_no_sense_is_refused(agent: Agent, document: dict[str, Any], told: str) -> None:
    answer = agent.client.post("/models", json=document)
    assert (answer.status_code, told in answer.json()["error"]) == (400, True)


def test_a_load_that_fails_leaves_nothing(agent: Agent) -> None:
    assert agent.load("dd44").status_code == 404
    agent.archive("dd44").mkdir(parents=True)
    assert agent.load("dd44").status_code == 400
    directory = write_model(agent.archive("dd44"), "m", 'backend: "nothing"')
    assert agent.load("dd44").status_code == 400
    assert agent.index() == []
    (directory / "config.pbtxt").write_text(FAILING_CONFIG)
    (directory / "1" / "model.py").write_text(FAILING)
    assert agent.load("dd44").status_code == 200
    assert agent.invoke("dd44").status_code == 507


def test_other_methods_are_not_there(agent: Agent) -> None:
    assert agent.client.put("/models").status_code == 405
    assert agent.client.get("/models/aa11/invoke").status_code == 405
    assert agent.client.get("/modules").status_code == 404


def test_models_come_only_where_requests_may_load(tmp_path: Path) -> None:
    write_identity(tmp_path, "echo")
    options: dict[str, Any] = {"allow_sagemaker": True, "sagemaker_port": 0}
    restrictions = ("model-repository:key=secret",)
    with (
        running_server(tmp_path, **options, http_restricted_api=restrictions) as running,
        Agent(running, tmp_path).client as client,
    ):
        document = {"model_name": "m", "url": str(tmp_path)}
        assert client.post("/models", json=document).status_code == 403
        answer = client.post("/models", json=document, headers={"key": "secret"})
        assert (answer.status_code, "--model-control-mode=explicit" in answer.json()["error"]) == (503, True)


def test_scopes_are_those_of_the_routes_whatever_a_model_is_called(tmp_path: Path) -> None:
    """A key for inference is none for control, also of a model whose name ends a path as inference does."""
    (tmp_path / "repository").mkdir()
    keys = KeyFile(tmp_path / "keys.yaml")
    headers = {scope: {"x-api-key": keys.add(scope.value, scope)} for scope in (Scope.INFER, Scope.ADMIN)}
    options: dict[str, Any] = {"allow_sagemaker": True, "sagemaker_port": 0, "model_control_mode": "explicit"}
    with running_server(tmp_path / "repository", api_keys_file=str(keys.path), **options) as running:
        agent = Agent(running, tmp_path / "models")
        with agent.client as client:
            for name in ("invoke", "models"):
                write_identity(agent.archive(name), "inner")
                client.headers = httpx.Headers(headers[Scope.ADMIN])
                assert agent.load(name).status_code == 200
                assert agent.invoke(name).status_code == 403
                client.headers = httpx.Headers(headers[Scope.INFER])
                for path in (f"/models/{name}", f"/models/{name}/", f"/models/%{ord(name[0]):x}{name[1:]}"):
                    assert client.delete(path).status_code == 403, path
                    assert client.get(path).status_code == 403, path
                assert agent.load(name).status_code == 403
                assert agent.invoke(name).status_code == 200
            client.headers = httpx.Headers(headers[Scope.ADMIN])
            assert client.delete("/models/invoke").status_code == 200
            client.headers = httpx.Headers()
            assert client.get("/ping").status_code == 200
            assert client.get("/nothing").status_code == 401
