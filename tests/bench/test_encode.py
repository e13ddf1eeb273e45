"""Requests as the server reads them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from modelserver.bench.encode import RequestForm, SharedOutput
from modelserver.bench.feed import HOLE_BYTES
from modelserver.bench.tensors import InputTensor
from modelserver.client.address import Address
from modelserver.client.heads import GrpcRequestHead, HttpRequestHead
from modelserver.core.datatype import Datatype
from modelserver.errors import InvalidArgumentError
from modelserver.pb import grpc_service_pb2 as pb

ADDRESS = Address("localhost", 8000)
HEAD = HttpRequestHead(ADDRESS, "POST", "/v2/models/m/infer", {"X-Key": "1"})
TENSOR = InputTensor("A", Datatype.INT32, (2,), np.array([1, 2], np.int32).tobytes())


def test_an_http_request_has_its_tensors_behind_the_json() -> None:
    template = RequestForm("m", "", parameters={"p": 3}).http(HEAD, [TENSOR], {})
    head, _, body = template.content.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /v2/models/m/infer HTTP/1.1"
    fields = dict(line.split(": ", 1) for line in lines[1:])
    assert fields["Content-Length"] == str(len(body))
    assert fields["X-Key"] == "1"
    json_len = int(fields["Inference-Header-Content-Length"])
    document = json.loads(body[:json_len])
    assert document["inputs"] == [
        {"name": "A", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": 8}}
    ]
    assert document["parameters"] == {"binary_data_output": True, "p": 3}
    assert body[json_len:] == TENSOR.raw
    assert template.hole == -1


def test_the_hole_of_a_sequence_is_blanks_within_the_parameters() -> None:
    template = RequestForm("m", "", has_sequence=True).http(HEAD, [TENSOR], {})
    assert template.content[template.hole : template.hole + HOLE_BYTES] == b" " * HOLE_BYTES
    filled = template.content.replace(b" " * HOLE_BYTES, b',"sequence_id":5'.ljust(HOLE_BYTES))
    body = filled.partition(b"\r\n\r\n")[2]
    assert json.loads(body[: body.rindex(b"}") + 1])["parameters"]["sequence_id"] == 5


def test_json_tensors() -> None:
    text = InputTensor("T", Datatype.BYTES, (1,), b"\x02\x00\x00\x00hi")
    template = RequestForm("m", "", is_input_json=True, is_output_json=True).http(HEAD, [TENSOR, text], {})
    head, _, body = template.content.partition(b"\r\n\r\n")
    assert b"Inference-Header" not in head
    document = json.loads(body)
    assert [entry["data"] for entry in document["inputs"]] == [[1, 2], ["hi"]]
    assert document["parameters"] == {"binary_data_output": False}
    with pytest.raises(InvalidArgumentError, match="BF16"):
        InputTensor("B", Datatype.BF16, (1,), b"\0\0").values()


def test_shared_memory_is_named_in_place_of_bytes() -> None:
    shared = InputTensor("A", Datatype.INT32, (2,), TENSOR.raw, region="in", region_offset=64)
    form = RequestForm("m", "2", outputs=[SharedOutput("O", "out", 100)])
    document = json.loads(form.http(HEAD, [shared], {}).content.partition(b"\r\n\r\n")[2])
    wanted = {"shared_memory_region": "in", "shared_memory_byte_size": 8, "shared_memory_offset": 64}
    assert document["inputs"][0]["parameters"] == wanted
    assert document["outputs"][0]["parameters"]["shared_memory_region"] == "out"
    message = pb.ModelInferRequest.FromString(form.grpc([shared], {}, asks_for_final=False).content)
    assert message.inputs[0].parameters["shared_memory_offset"].int64_param == 64
    assert message.outputs[0].parameters["shared_memory_byte_size"].int64_param == 100
    assert not message.raw_input_contents


def test_a_grpc_message() -> None:
    form = RequestForm("m", "2", parameters={"flag": True, "text": "t", "number": 4})
    message = pb.ModelInferRequest.FromString(form.grpc([TENSOR], {}, asks_for_final=True).content)
    assert (message.model_name, message.model_version) == ("m", "2")
    assert list(message.raw_input_contents) == [TENSOR.raw]
    assert message.parameters["flag"].bool_param
    assert message.parameters["text"].string_param == "t"
    assert message.parameters["number"].int64_param == 4
    assert message.parameters["triton_enable_empty_final_response"].bool_param


def test_grpc_heads_name_the_compression() -> None:
    fields = dict(GrpcRequestHead(ADDRESS, "ModelInfer", {"Authorization": "t"}, "gzip").fields)
    assert fields[b":path"] == b"/inference.GRPCInferenceService/ModelInfer"
    assert fields[b"grpc-encoding"] == b"gzip"
    assert fields[b"authorization"] == b"t"
    assert b"grpc-encoding" not in dict(GrpcRequestHead(ADDRESS, "ModelInfer").fields)
