"""The Open Inference Protocol's promises that no other file here holds the server to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from support.clients import ClientError, GrpcClient, HttpClient, ProtocolClient
from support.model_files import write_identity, write_model
from support.serving import RunningServer, running_server

from modelserver.core.datatype import Datatype
from modelserver.errors import ErrorCode
from modelserver.pb import grpc_service_pb2 as pb
from modelserver.protocol.grpc_status import STATUS_OF
from modelserver.protocol.response import STATUS

RAISES = """
import numpy as np
import triton_python_backend_utils as pb_utils

NAMES = "UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS CANCELLED".split()

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            code = int(pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()[0])
            error = pb_utils.TritonError(f"code {code}", getattr(pb_utils.TritonError, NAMES[code]))
            answers.append(pb_utils.InferenceResponse(error=error))
        return answers
"""
RAISES_CONFIG = """
backend: "python"
input [ { name: "CODE" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "NOTHING" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
# What Triton gives its backends: number -> our code.
CODES = [
    ErrorCode.UNKNOWN,
    ErrorCode.INTERNAL,
    ErrorCode.NOT_FOUND,
    ErrorCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED,
    ErrorCode.ALREADY_EXISTS,
    ErrorCode.CANCELLED,
]
# Elements as JSON, and as the typed contents of gRPC: field and values.
ELEMENTS: dict[Datatype, tuple[list[Any], str]] = {
    Datatype.BOOL: ([True, False], "bool_contents"),
    Datatype.UINT8: ([0, 255], "uint_contents"),
    Datatype.UINT16: ([0, 65535], "uint_contents"),
    Datatype.UINT32: ([0, 2**32 - 1], "uint_contents"),
    Datatype.UINT64: ([0, 2**64 - 1], "uint64_contents"),
    Datatype.INT8: ([-128, 127], "int_contents"),
    Datatype.INT16: ([-(2**15), 2**15 - 1], "int_contents"),
    Datatype.INT32: ([-(2**31), 2**31 - 1], "int_contents"),
    Datatype.INT64: ([-(2**63), 2**63 - 1], "int64_contents"),
    Datatype.FP32: ([-1.5, 1e30], "fp32_contents"),
    Datatype.FP64: ([-1.5, 1e300], "fp64_contents"),
    Datatype.BYTES: (["", "a\x00ü"], "bytes_contents"),
}


@pytest.fixture(scope="module")
def served(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("served")
    for datatype in Datatype:
        write_identity(root, f"echo_{datatype.value}", data_type=datatype.config_name)
    directory = write_model(root, "raises", RAISES_CONFIG)
    (directory / "1" / "model.py").write_text(RAISES)
    with running_server(root) as running:
        yield running


def _post(server: RunningServer, model: str, document: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://{server.http_url}/v2/models/{model}/infer", json=document)


def _infer(server: RunningServer, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        return pb.ModelInferResponse.FromString(call(request.SerializeToString(), timeout=20))


@pytest.mark.parametrize("datatype", ELEMENTS)
@pytest.mark.parametrize("is_nested", [True, False])
def test_every_datatype_as_json(served: RunningServer, datatype: Datatype, is_nested: bool) -> None:
    elements, _ = ELEMENTS[datatype]
    data = [[element] for element in elements] if is_nested else elements
    tensor = {"name": "INPUT0", "datatype": datatype.value, "shape": [2, 1], "data": data}
    answer = _post(served, f"echo_{datatype.value}", {"inputs": [tensor]})
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    assert output["shape"] == [2, 1]
    expected = [float(np.float32(element)) for element in elements] if datatype is Datatype.FP32 else elements
    got = [float(np.float32(value)) for value in output["data"]] if datatype is Datatype.FP32 else output["data"]
    assert got == expected


@pytest.mark.parametrize("datatype", ELEMENTS)
def test_every_datatype_as_typed_contents(served: RunningServer, datatype: Datatype) -> None:
    elements, field = ELEMENTS[datatype]
    values = [element.encode() for element in elements] if datatype is Datatype.BYTES else elements
    request = pb.ModelInferRequest(model_name=f"echo_{datatype.value}")
    tensor = request.inputs.add(name="INPUT0", datatype=datatype.value, shape=[2, 1])
    getattr(tensor.contents, field).extend(values)
    response = _infer(served, request)
    assert not response.outputs[0].HasField("contents")
    (raw,) = response.raw_output_contents
    if datatype is Datatype.BYTES:
        assert raw == b"\x00\x00\x00\x00" + b"\x04\x00\x00\x00" + "a\x00ü".encode()
    else:
        assert np.frombuffer(raw, datatype.numpy).tolist() == np.array(elements, datatype.numpy).tolist()


@pytest.mark.parametrize("datatype", [Datatype.FP16, Datatype.BF16])
def test_half_precision_travels_raw_only(served: RunningServer, datatype: Datatype) -> None:
    tensor = {"name": "INPUT0", "datatype": datatype.value, "shape": [1, 1], "data": [1.0]}
    answer = _post(served, f"echo_{datatype.value}", {"inputs": [tensor]})
    assert (answer.status_code, "binary" in answer.json()["error"]) == (400, True)
    request = pb.ModelInferRequest(model_name=f"echo_{datatype.value}")
    request.inputs.add(name="INPUT0", datatype=datatype.value, shape=[1, 1]).contents.fp32_contents.append(1)
    with pytest.raises(grpc.RpcError, match="raw_input_contents"):
        _infer(served, request)


def test_text_that_is_none_has_no_json_form(served: RunningServer) -> None:
    tensor = {"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 5}}
    header = json.dumps({"inputs": [tensor]}).encode()
    answer = httpx.post(
        f"http://{served.http_url}/v2/models/echo_BYTES/infer",
        content=header + b"\x01\x00\x00\x00\xff",
        headers={"Inference-Header-Content-Length": f"{len(header)}"},
    )
    assert (answer.status_code, "binary_data" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("request_id", ["", "r-1", "ü" * 100])
def test_an_id_is_echoed_or_absent(served: RunningServer, request_id: str) -> None:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    document = {"inputs": [tensor]} | ({"id": request_id} if request_id else {})
    answer = _post(served, "echo_INT32", document).json()
    assert answer.get("id") == (request_id or None)
    request = pb.ModelInferRequest(model_name="echo_INT32", id=request_id, raw_input_contents=[b"\x00" * 4])
    request.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 1])
    assert _infer(served, request).id == request_id


@pytest.mark.parametrize("version", ["", "1"])
def test_the_version_is_optional(served: RunningServer, protocol: type[ProtocolClient], version: str) -> None:
    with protocol(served) as client:
        answer = client.infer("echo_INT32", {"INPUT0": np.ones((1, 1), np.int32)}, version=version)
        assert answer.model_version == "1"
        assert client.model_metadata("echo_INT32", version)["versions"] == ["1"]
        assert client.model_config("echo_INT32", version)["name"] == "echo_INT32"
        assert client.is_model_ready("echo_INT32", version)
        assert [row["version"] for row in client.statistics("echo_INT32", version)] == ["1"]


def test_an_input_may_not_be_given_twice(served: RunningServer) -> None:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    answer = _post(served, "echo_INT32", {"inputs": [tensor, tensor]})
    assert (answer.status_code, "INPUT0" in answer.json()["error"]) == (400, True)
    request = pb.ModelInferRequest(model_name="echo_INT32")
    for _ in range(2):
        request.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 1])
        request.raw_input_contents.append(b"\x00" * 4)
    with pytest.raises(grpc.RpcError, match="INPUT0") as refused:
        _infer(served, request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_output_that_is_asked_for_twice_is_refused(served: RunningServer) -> None:
    tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [7]}
    binary = {"name": "OUTPUT0", "parameters": {"binary_data": True}}
    told = "output 'OUTPUT0' already exists in request"
    for _ in range(2):  # the second one is recognised by what the first one was
        reply = _post(served, "echo_INT32", {"inputs": [tensor], "outputs": [{"name": "OUTPUT0"}, binary]})
        assert reply.status_code == 400
        assert reply.json()["error"].startswith(told)
        request = pb.ModelInferRequest(model_name="echo_INT32", raw_input_contents=[b"\7\0\0\0"])
        request.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 1])
        for count in (0, 2):
            request.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = count
        with pytest.raises(grpc.RpcError, match=told) as refused:
            _infer(served, request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("number", range(len(CODES)))
def test_both_protocols_give_a_model_s_error_the_status_of_its_code(served: RunningServer, number: int) -> None:
    code = CODES[number]
    with HttpClient(served) as client, pytest.raises(ClientError, match=f"code {number}") as over_http:
        client.infer("raises", {"CODE": np.array([number], np.int32)})
    assert over_http.value.status == str(STATUS[code])
    with GrpcClient(served) as client, pytest.raises(ClientError, match=f"code {number}") as over_grpc:
        client.infer("raises", {"CODE": np.array([number], np.int32)})
    assert over_grpc.value.status == f"StatusCode.{STATUS_OF[code].name}"


def test_tensors_without_elements(served: RunningServer, protocol: type[ProtocolClient]) -> None:
    with protocol(served) as client:
        for datatype in ("INT32", "BYTES"):
            data = np.empty((2, 0), object if datatype == "BYTES" else np.int32)
            answer = client.infer(f"echo_{datatype}", {"INPUT0": data}, datatypes={"INPUT0": datatype})
            assert answer["OUTPUT0"].shape == (2, 0)
        with pytest.raises(ClientError, match=r"batch|shape|rows"):
            client.infer("echo_INT32", {"INPUT0": np.empty((0, 1), np.int32)})
