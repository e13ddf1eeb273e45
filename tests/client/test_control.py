"""Control of a running server: the same documents and the same errors over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.model_files import write_identity
from support.serving import RunningServer, running_server

from modelserver.client.control import ControlClient
from modelserver.client.endpoint import endpoint_at
from modelserver.errors import InvalidArgumentError, NotFoundError, UnavailableError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    write_identity(repository, "echo", data_type="TYPE_INT32")
    with running_server(
        repository, model_control_mode="explicit", load_model=["echo"], allow_client_shm=True
    ) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def control(request: pytest.FixtureRequest, server: RunningServer) -> ControlClient:
    is_grpc = request.param == "grpc"
    return endpoint_at(server.grpc_url if is_grpc else f"http://{server.http_url}", is_grpc=is_grpc).control()


def test_documents_have_the_same_names(control: ControlClient) -> None:
    assert [(row["name"], row["state"]) for row in control.index()] == [("echo", "READY")]
    assert control.model_metadata("echo")["inputs"][0]["datatype"] == "INT32"
    assert control.model_config("echo", "1")["name"] == "echo"
    assert [(row["name"], row["version"]) for row in control.statistics("echo")] == [("echo", "1")]


def test_a_model_is_loaded_with_another_config_and_unloaded(control: ControlClient) -> None:
    changed = control.model_config("echo") | {"max_batch_size": 3}
    control.load("echo", {"config": json.dumps(changed)})
    assert control.model_config("echo")["max_batch_size"] == 3
    control.unload("echo", {"unload_dependents": False})
    with pytest.raises((NotFoundError, InvalidArgumentError, UnavailableError)):
        control.model_metadata("echo")
    control.load("echo")
    assert control.model_config("echo").get("max_batch_size", 0) != 3


def test_a_region_is_registered_once(control: ControlClient, tmp_path: Path) -> None:
    memory = Path("/dev/shm") / f"modelserver_test_{tmp_path.name}"
    memory.write_bytes(bytes(64))
    try:
        details = {"key": f"/{memory.name}", "offset": 0, "byte_size": 64}
        control.register_region("ours", "system", details)
        control.unregister_region("ours", "system")
        with pytest.raises(InvalidArgumentError, match="nowhere"):
            control.register_region("ours", "system", details | {"key": "/nowhere"})
    finally:
        memory.unlink()


@pytest.mark.parametrize("question", ["model_metadata", "model_config", "statistics"])
def test_an_unknown_model_gets_a_hint(control: ControlClient, question: str) -> None:
    with pytest.raises(NotFoundError, match="did you mean 'echo'"):
        getattr(control, question)("ecko")
    with pytest.raises(NotFoundError) as raised:
        getattr(control, question)("zzzzzzzz")
    assert "did you mean" not in raised.value.message


@pytest.mark.parametrize("is_grpc", [False, True])
def test_an_address_without_a_server(is_grpc: bool) -> None:
    with pytest.raises(UnavailableError, match="or say where it is with --url or MODELSERVER_URL"):
        endpoint_at("127.0.0.1:1", is_grpc=is_grpc).control().index()
