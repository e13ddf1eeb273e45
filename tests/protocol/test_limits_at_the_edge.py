"""Limits to the byte: what has just the size that is allowed is served, and one more is refused, in words."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.model_files import write_identity
from support.serving import ADDRESS, RunningServer, running_server

from modelserver.errors import ErrorCode
from modelserver.pb import grpc_service_pb2 as pb

MAX_BYTES = 100_000
COMPRESSIONS = {"plain": grpc.Compression.NoCompression, "gzip": grpc.Compression.Gzip}


@pytest.fixture(scope="module")
def bounded(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("bounded")
    write_identity(root, "echo")
    with running_server(root, http_max_input_size=MAX_BYTES, grpc_max_request_size=MAX_BYTES) as running:
        yield running


@pytest.fixture
def client(protocol: type[ProtocolClient], bounded: RunningServer) -> Iterator[ProtocolClient]:
    with protocol(bounded) as connected:
        yield connected


def refusal(client: ProtocolClient, name: str, shape: tuple[int, ...]) -> str:
    """What is said of an input that the model does not take, whatever the limit."""
    with pytest.raises(ClientError) as refused:
        client.infer("echo", {name: np.ones(shape, np.float32)})
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    return str(refused.value)


def test_a_tensor_s_name_has_1024_characters_at_most(client: ProtocolClient) -> None:
    assert "longer than" not in refusal(client, "x" * 1024, (1, 1))
    assert "longer than 1024 characters" in refusal(client, "x" * 1025, (1, 1))


def test_a_shape_has_32_dimensions_at_most(client: ProtocolClient) -> None:
    assert "at most" not in refusal(client, "INPUT0", (1,) * 32)
    assert "at most 32" in refusal(client, "INPUT0", (1,) * 33)


@pytest.mark.parametrize(("excess", "status"), [(0, 200), (4, 413)])
def test_numbers_of_json_have_the_memory_of_a_body(bounded: RunningServer, excess: int, status: int) -> None:
    """A number of two bytes in JSON takes four as FP32, eight as FP64: what counts is what it becomes."""
    num_elements = (MAX_BYTES + excess) // 4
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, num_elements], "data": [0] * num_elements}
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":"))
    assert len(body) < MAX_BYTES
    connection = http.client.HTTPConnection(ADDRESS, bounded.server.http_port, timeout=20)
    connection.request("POST", "/v2/models/echo/infer", body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    assert answer.status == status
    assert ("--http-max-input-size" in text) is bool(excess)


def message_of(num_bytes: int) -> bytes:
    """A ModelInferRequest of exactly that size."""
    request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(MAX_BYTES // 2)])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, MAX_BYTES // 8])
    request.id = "x" * 20_000
    request.id = "x" * (20_000 + num_bytes - request.ByteSize())
    message: bytes = request.SerializeToString()
    assert len(message) == num_bytes
    return message


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_message_may_have_the_size_of_the_limit(bounded: RunningServer, compression: str) -> None:
    """As sent, and as unpacked."""
    with grpc.insecure_channel(bounded.grpc_url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer = infer(message_of(MAX_BYTES), timeout=20, compression=COMPRESSIONS[compression])
        assert pb.ModelInferResponse.FromString(answer).raw_output_contents == [bytes(MAX_BYTES // 2)]
        with pytest.raises(grpc.RpcError) as refused:
            infer(message_of(MAX_BYTES + 1), timeout=20, compression=COMPRESSIONS[compression])
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MAX_BYTES) in refused.value.details()
