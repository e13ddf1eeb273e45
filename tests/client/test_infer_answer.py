"""Outputs of answers in their three forms."""

from __future__ import annotations

import json

import numpy as np
import pytest

from modelserver.client.infer_answer import grpc_outputs, http_outputs
from modelserver.pb import grpc_service_pb2 as pb

RAW = np.array([1, 2], np.int32).tobytes()
BINARY = {"name": "A", "datatype": "INT32", "shape": [2], "parameters": {"binary_data_size": len(RAW)}}
TEXT = {"name": "B", "datatype": "FP32", "shape": [1, 2], "data": [0.5, 1.5]}


def test_binary_outputs_and_values_of_json() -> None:
    head = json.dumps({"outputs": [BINARY, TEXT]}).encode()
    document, outputs = http_outputs(head + RAW, len(head))
    assert document["outputs"][0] == BINARY
    assert [output.raw for output in outputs] == [RAW, None]
    assert [output.tensor().data.tolist() for output in outputs] == [[1, 2], [[0.5, 1.5]]]


def test_an_answer_of_json_alone() -> None:
    _, (output,) = http_outputs(json.dumps({"outputs": [TEXT]}).encode(), None)
    assert output.tensor().shape == (1, 2)


@pytest.mark.parametrize("body", [RAW[:-1], RAW + b"x"])
def test_bytes_that_do_not_fit_their_sizes(body: bytes) -> None:
    head = json.dumps({"outputs": [BINARY]}).encode()
    with pytest.raises(ValueError, match="its tensors end at byte"):
        http_outputs(head + body, len(head))


def test_an_output_in_shared_memory_has_no_data() -> None:
    response = pb.ModelInferResponse(outputs=[{"name": "A", "datatype": "INT32", "shape": [2]}])
    (output,) = grpc_outputs(response)
    assert output.raw is None
    with pytest.raises(ValueError, match="output 'A' has no data"):
        output.tensor()
    response.raw_output_contents.append(RAW)
    assert grpc_outputs(response)[0].tensor().data.tolist() == [1, 2]
