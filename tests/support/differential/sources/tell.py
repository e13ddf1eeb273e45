"""Answers with what it is told about the request, as JSON."""

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
            "is_cancelled": request.is_cancelled(),
            "inputs": [[tensor.name(), list(tensor.as_numpy().shape), tensor.is_cpu()] for tensor in request.inputs()],
        }
        text = np.array([json.dumps(told).encode()], dtype=object)
        other = np.array([1], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", text), pb_utils.Tensor("OTHER", other)])
