"""Health, metadata, config and statistics, the same over both protocols."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.latches import LATCHES, write_latched
from support.layouts import free_port
from support.model_files import write_identity
from support.processes import serving_process
from support.waiting import until_true

from modelserver.errors import ErrorCode


def test_the_server_is_live_and_ready(client: ProtocolClient) -> None:
    assert client.is_live()
    assert client.is_ready()
    assert client.is_model_ready("digits_onnx")
    assert client.is_model_ready("digits_versions", "3")


def test_an_unknown_model_is_not_ready(client: ProtocolClient) -> None:
    assert not client.is_model_ready("nobody")
    assert not client.is_model_ready("digits_onnx", "7")


def test_server_metadata_lists_only_what_is_on(client: ProtocolClient) -> None:
    metadata = client.server_metadata()
    assert metadata["name"] == "triton"
    assert metadata["version"]
    assert {"binary_tensor_data", "statistics", "model_repository"} <= set(metadata["extensions"])
    assert not {"system_shared_memory", "cuda_shared_memory"} & set(metadata["extensions"])


def test_model_metadata_shows_the_batch_dimension(client: ProtocolClient) -> None:
    metadata = client.model_metadata("digits_onnx")
    assert metadata["name"] == "digits_onnx"
    assert metadata["versions"] == ["1"]
    assert [[int(size) for size in tensor["shape"]] for tensor in metadata["inputs"]] == [[-1, 8, 8]]
    assert [tensor["datatype"] for tensor in metadata["outputs"]] == ["FP32", "INT64"]


def test_the_config_is_the_completed_one(client: ProtocolClient) -> None:
    config = client.model_config("digits_versions")
    assert config["backend"] == "onnxruntime"
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["instance_group"][0]["kind"] == "KIND_CPU"


@pytest.mark.parametrize("ask", ["model_metadata", "model_config", "statistics"])
def test_asking_about_nobody_is_not_found(client: ProtocolClient, ask: str) -> None:
    with pytest.raises(ClientError) as refused:
        getattr(client, ask)("nobody")
    assert refused.value.code in (ErrorCode.NOT_FOUND, ErrorCode.INVALID_ARGUMENT)


def test_statistics_of_what_is_not_there(client: ProtocolClient) -> None:
    with pytest.raises(ClientError, match=r"requested model version is not available for model 'digits_onnx': .*ready"):
        client.statistics("digits_onnx", "7")
    with pytest.raises(ClientError, match="requested model 'nobody' is not available: Request for unknown model"):
        client.statistics("nobody")


def _statistics(client: ProtocolClient, model: str) -> dict[str, int]:
    (row,) = client.statistics(model)
    inference = row.get("inference_stats", {})

    def count(name: str) -> int:
        return int(inference.get(name, {}).get("count", 0))

    return {
        "inferences": int(row.get("inference_count", 0)),
        "executions": int(row.get("execution_count", 0)),
        "success": count("success"),
        "fail": count("fail"),
        "queue": count("queue"),
        "compute": count("compute_infer"),
    }


def test_statistics_count_what_happened(client: ProtocolClient) -> None:
    before = _statistics(client, "digits_onnx")
    for rows in (1, 3, 5):
        client.infer("digits_onnx", {"image": np.zeros((rows, 8, 8), np.float32)})
    after = _statistics(client, "digits_onnx")
    gained = {key: after[key] - before[key] for key in after}
    assert gained == {"inferences": 9, "executions": 3, "success": 3, "fail": 0, "queue": 3, "compute": 3}


def test_statistics_of_all_models_have_a_row_per_version(client: ProtocolClient) -> None:
    rows = {(row["name"], row["version"]) for row in client.statistics()}
    assert {("digits_versions", "2"), ("digits_versions", "3"), ("identity", "1")} <= rows


def test_the_index_shows_every_model(client: ProtocolClient) -> None:
    states = {(row["name"], row.get("version")): row.get("state") for row in client.index()}
    assert states["digits_onnx", "1"] == "READY"
    assert states["digits_versions", "3"] == "READY"


@pytest.mark.one_layout
def test_liveness_answers_and_readiness_waits_while_a_model_loads(
    layout: str, protocol: type[ProtocolClient], tmp_path: Path
) -> None:
    write_identity(tmp_path, "quick")
    latch = write_latched(tmp_path, "slow", held="load")
    http_port = free_port()
    grpc_port = http_port if layout == "native-one-port" else free_port()
    address = SimpleNamespace(http_url=f"127.0.0.1:{http_port}", grpc_url=f"127.0.0.1:{grpc_port}")
    with serving_process(tmp_path, LATCHES, f"--http-port={http_port}", f"--grpc-port={grpc_port}") as server:
        server.wait_for("gRPC.* listens")
        with protocol(address) as client:
            data = {"INPUT0": np.ones((1, 1), np.float32)}
            until_true(lambda: client.is_model_ready("quick"), "one model does not wait for another")
            assert client.is_live()
            assert not client.is_ready()
            assert not client.is_model_ready("slow")
            assert client.infer("quick", data)["OUTPUT0"].item() == 1
            with pytest.raises(ClientError, match="LOADING") as refused:
                client.infer("slow", data)
            assert refused.value.code is ErrorCode.UNAVAILABLE
            latch.open()
            server.wait_until_started()
            assert client.is_ready()
            assert client.infer("slow", data)["OUTPUT0"].item() == 1
