"""A model that is asked by an ensemble that it asks itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.clients import ClientError, ProtocolClient
from support.model_files import write_model
from support.serving import RunningServer, running_server

# Asks the ensemble for one less, until there is nothing left.
SOURCE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()) for request in requests]

    def answer(self, data):
        if data[0] <= 0:
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", data)])
        inputs = [pb_utils.Tensor("X", data - 1)]
        return pb_utils.InferenceRequest(model_name="circle", requested_output_names=["Y"], inputs=inputs).exec()
"""
IO = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
STEP = """
platform: "ensemble"
ensemble_scheduling { step [ {
  model_name: "%s" model_version: -1
  input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" }
} ] }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("circles")
    config = f'backend: "python"\ninstance_group [ {{ kind: KIND_CPU count: 2 }} ]\n{IO}'
    (write_model(root, "asking", config) / "1" / "model.py").write_text(SOURCE)
    write_model(root, "inner", STEP % "asking" + IO)
    write_model(root, "circle", STEP % "inner" + IO)
    with running_server(root) as running:
        yield running


@pytest.mark.parametrize("model", ["asking", "circle"])
def test_a_circle_through_ensembles_is_refused_where_no_instance_is_free(
    protocol: type[ProtocolClient], server: RunningServer, model: str
) -> None:
    with protocol(server) as client:
        assert client.infer(model, {"X": np.array([1], np.float32)})["Y"].tolist() == [0]
        with pytest.raises(ClientError, match=r"all its 2 instances wait .*\(asking -> asking -> asking\)"):
            client.infer(model, {"X": np.array([2], np.float32)})
