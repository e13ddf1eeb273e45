"""A Python model that tells what it was told: its answer is a JSON text about the request."""

from __future__ import annotations

from pathlib import Path

from support.model_files import write_model

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "TOLD" data_type: TYPE_STRING dims: [ 1 ] }, { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
"""

SOURCE = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.tell(request) for request in requests]

    def tell(self, request):
        told = {
            "id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "parameters": json.loads(request.parameters()),
            "outputs": sorted(request.requested_output_names()),
        }
        text = pb_utils.get_input_tensor_by_name(request, "TEXT")
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("TOLD", np.array([json.dumps(told).encode()], dtype=object)),
            pb_utils.Tensor("TEXT", text.as_numpy()),
        ])
"""


def write_reflecting(repository: Path, name: str = "reflect") -> None:
    directory = write_model(repository, name, CONFIG)
    (directory / "1" / "model.py").write_text(SOURCE)
