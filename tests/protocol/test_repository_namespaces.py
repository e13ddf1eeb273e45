"""Models of one name in several repositories, the same over both protocols. What Triton answers was asked of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.control_calls import control_model, list_index
from support.model_files import write_identity, write_model
from support.serving import RunningServer, running_server
from support.waiting import until_true

from modelserver.errors import ErrorCode
from modelserver.pb import grpc_service_pb2 as pb

AMBIGUOUS = (
    "There are 2 identifiers of model 'both' in global map, model namespace must be provided to resolve ambiguity."
)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    for root, names in (("one", ("both", "mine")), ("two", ("both", "yours"))):
        for name in names:
            write_identity(tmp_path / root, name)
    return tmp_path / "one", tmp_path / "two"


@pytest.fixture
def server(roots: tuple[Path, Path]) -> Iterator[RunningServer]:
    with running_server(roots, model_namespacing=True, model_control_mode="explicit", load_model=("*",)) as running:
        yield running


@pytest.fixture
def client(protocol: type[ProtocolClient], server: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(server) as connected:
        yield connected


def infer(client: ProtocolClient, model: str) -> str:
    return client.infer(model, {"INPUT0": np.ones((1, 1), np.float32)}).model_name


def test_names_and_keys(client: ProtocolClient) -> None:
    assert infer(client, "mine") == "mine"
    assert infer(client, "one::both") == "one::both"
    assert client.model_metadata("two::both")["versions"] == ["1"]
    with pytest.raises(ClientError) as refused:
        infer(client, "both")
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    assert refused.value.message.startswith(AMBIGUOUS)
    assert not client.is_model_ready("both")
    assert client.is_model_ready("two::both")
    assert client.is_ready()
    assert len(client.statistics()) == 4


def test_control(client: ProtocolClient, server: RunningServer, protocol: type[ProtocolClient]) -> None:
    names = [row["name"] for row in list_index(server, protocol)]
    assert names == ["both", "mine", "both", "yours"]
    assert [row["name"] for row in list_index(server, protocol, "two")] == ["both", "yours"]
    with pytest.raises(ClientError) as unknown:
        list_index(server, protocol, "three")
    assert unknown.value.code is ErrorCode.NOT_FOUND

    control_model(server, protocol, "unload", "both", repository="one")
    assert infer(client, "both") == "both"
    control_model(server, protocol, "load", "both")
    with pytest.raises(ClientError, match="identifiers"):
        infer(client, "both")
    client.unload("both")
    assert not client.is_model_ready("one::both")
    assert not client.is_model_ready("two::both")
    with pytest.raises(ClientError) as unknown:
        control_model(server, protocol, "load", "both", repository="three")
    assert unknown.value.code is ErrorCode.NOT_FOUND


def test_the_rows_of_the_index_name_the_repository(server: RunningServer) -> None:
    expected = [("one", "both"), ("one", "mine"), ("two", "both"), ("two", "yours")]
    rows = httpx.post(f"http://{server.http_url}/v2/repository/index").json()
    assert [(row["repository"], row["name"]) for row in rows] == expected
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/RepositoryIndex",
            request_serializer=pb.RepositoryIndexRequest.SerializeToString,
            response_deserializer=pb.RepositoryIndexResponse.FromString,
        )
        answer = call(pb.RepositoryIndexRequest(), timeout=30)
    assert [(row.repository, row.name) for row in answer.models] == expected


def test_metrics_name_the_namespace_as_triton_does(server: RunningServer, roots: tuple[Path, Path]) -> None:
    text = httpx.get(f"http://{server.metrics_url}/metrics").text
    for root in roots:
        assert f'nv_inference_count{{model="both",namespace="{root}",version="1"}} 0' in text


WRAPPED = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN", data_type: TYPE_FP32, dims: [ -1 ] } ]
output [ { name: "OUT", data_type: TYPE_FP32, dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "step" model_version: -1
    input_map { key: "INPUT0" value: "IN" } output_map { key: "OUTPUT0" value: "OUT" } } ] }
"""


@pytest.fixture
def wrapping(roots: tuple[Path, Path]) -> tuple[Path, Path]:
    """An ensemble in the first repository, whose step is in the second."""
    write_model(roots[0], "whole", WRAPPED)
    write_identity(roots[1], "step", versions=(2,))
    return roots


def called(client: ProtocolClient) -> set[str]:
    """The versions of the step that have executed something, after one more request to the ensemble."""
    before = executed(client)
    client.infer("whole", {"IN": np.ones((1, 1), np.float32)})
    return {version for version, count in executed(client).items() if count > before.get(version, 0)}


def executed(client: ProtocolClient) -> dict[str, int]:
    """The repositories have different versions of the step."""
    rows = [row for row in client.statistics() if row["name"].endswith("step")]
    return {row["version"]: int(row["inference_stats"]["success"]["count"]) for row in rows}


def test_an_ensemble_calls_the_models_of_its_own_namespace_whenever_they_are_there(
    protocol: type[ProtocolClient], wrapping: tuple[Path, Path]
) -> None:
    """Here they are loaded and unloaded one by one. What Triton answers was asked of it."""
    options = {"model_control_mode": "explicit", "load_model": ("whole",)}
    with running_server(wrapping, model_namespacing=True, **options) as running, protocol(running) as client:
        assert called(client) == {"2"}
        write_identity(wrapping[0], "step", versions=(1,))
        assert called(client) == {"2"}, "it is not loaded"
        control_model(running, protocol, "load", "step", repository="one")
        assert called(client) == {"1"}
        control_model(running, protocol, "unload", "step", repository="one")
        assert called(client) == {"2"}
        control_model(running, protocol, "unload", "step", repository="two")
        assert not client.is_model_ready("whole")
        control_model(running, protocol, "load", "step", repository="two")
        assert called(client) == {"2"}


@pytest.mark.one_layout
def test_an_ensemble_follows_its_models_from_one_namespace_to_another_on_disk(
    protocol: type[ProtocolClient], wrapping: tuple[Path, Path]
) -> None:
    one, two = wrapping
    options = {"model_control_mode": "poll", "repository_poll_secs": 1}

    def is_called(version: str) -> bool:
        try:
            return called(client) == {version}
        except ClientError:
            return False

    with running_server(wrapping, model_namespacing=True, **options) as running, protocol(running) as client:
        assert called(client) == {"2"}
        write_identity(one, "step", versions=(1,))
        until_true(lambda: is_called("1"), "the own one came")
        shutil.rmtree(one / "step")
        until_true(lambda: is_called("2"), "the own one went")
        shutil.rmtree(two / "step")
        until_true(lambda: not client.is_model_ready("whole"), "none is left")
        write_identity(one, "step", versions=(3,))
        until_true(lambda: is_called("3"), "another one came")
