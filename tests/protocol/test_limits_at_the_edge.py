"""Limits to the byte: what has just the size that is allowed is served, and one more is refused, in words."""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Iterator
from typing import Any

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


def test_a_shape_has_no_more_bytes_than_64_bits_can_count(client: ProtocolClient) -> None:
    """Counted without its zeros, and with eight bytes for an element."""
    told = ("byte size overflow", "is too large")
    assert not any(words in refusal(client, "OTHER", (0, 2**60 - 1)) for words in told)
    text = refusal(client, "OTHER", (0, 2**60))
    assert any(words in text for words in told), text


@pytest.mark.parametrize("value", ["1", "[,:{"])
def test_a_request_has_1024_parameters_at_most(client: ProtocolClient, value: str) -> None:
    """Those of gRPC, and of a long text of JSON, are counted before they are parsed."""
    data = np.ones((1, 1), np.float32)
    parameters = {f"p{number}": value * 8 for number in range(1024)}
    assert client.infer("echo", {"INPUT0": data}, ["OUTPUT0"], parameters=parameters)["OUTPUT0"] == data
    with pytest.raises(ClientError, match="the request has more than 1024 parameters") as refused:
        client.infer("echo", {"INPUT0": data}, ["OUTPUT0"], parameters={**parameters, "p": "1"})
    assert refused.value.code is ErrorCode.INVALID_ARGUMENT


def post(running: RunningServer, path: str, document: object) -> tuple[int, str]:
    """POST a document; the status and the answer's text."""
    connection = http.client.HTTPConnection(ADDRESS, running.server.http_port, timeout=20)
    connection.request("POST", path, json.dumps(document, separators=(",", ":")))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize("owner", ["request", "inputs", "outputs"])
@pytest.mark.parametrize("value", [1, "[,:{" * 8])
@pytest.mark.parametrize("number", [1.0, math.nan])
@pytest.mark.parametrize("excess", [0, 1])
def test_parameters_of_json_are_counted(
    bounded: RunningServer, owner: str, value: int | str, number: float, excess: int
) -> None:
    """In short texts and in long ones, and where numbers are none of JSON's."""
    parameters = {f"{position}": value for position in range(1024 + excess)}
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [number]}
    document: dict[str, Any] = {"inputs": [tensor], "outputs": [{"name": "OUTPUT0"}]}
    (document if owner == "request" else document[owner][0])["parameters"] = parameters
    status, text = post(bounded, "/v2/models/echo/infer", document)
    assert (status, "more than 1024 parameters" in text) == ((400, True) if excess else (200, False))


@pytest.mark.parametrize("excess", [0, 1])
def test_parameters_of_generate_are_counted(bounded: RunningServer, excess: int) -> None:
    document = {"INPUT0": 1, "parameters": {f"p{number}": 1 for number in range(1024 + excess)}}
    status, text = post(bounded, "/v2/models/echo/generate", document)
    assert (status, "more than 1024 parameters" in text) == ((400, True) if excess else (200, False))


@pytest.mark.parametrize("owner", ["inputs", "outputs"])
def test_parameters_of_tensors_in_messages_are_counted(bounded: RunningServer, owner: str) -> None:
    request = pb.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(4)])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 1])
    request.outputs.add(name="OUTPUT0")
    parameters = getattr(request, owner)[0].parameters
    for number in range(1024):
        parameters[f"p{number}"].int64_param = 1
    with grpc.insecure_channel(bounded.grpc_url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer = infer(request.SerializeToString(), timeout=20)
        assert pb.ModelInferResponse.FromString(answer).raw_output_contents == [bytes(4)]
        parameters["p"].int64_param = 1
        with pytest.raises(grpc.RpcError) as refused:
            infer(request.SerializeToString(), timeout=20)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "more than 1024 parameters" in refused.value.details()


@pytest.mark.parametrize(("excess", "status"), [(0, 200), (4, 413)])
def test_numbers_of_json_have_the_memory_of_a_body(bounded: RunningServer, excess: int, status: int) -> None:
    """A number of two bytes in JSON takes four as FP32, eight as FP64: what counts is what it becomes."""
    num_elements = (MAX_BYTES + excess) // 4
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, num_elements], "data": [0] * num_elements}
    assert 2 * num_elements < MAX_BYTES * 0.9, "the body itself is within the limit"
    answer_status, text = post(bounded, "/v2/models/echo/infer", {"inputs": [tensor]})
    assert answer_status == status
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
