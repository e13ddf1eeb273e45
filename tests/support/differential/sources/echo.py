"""Answers every INPUT<x> with OUTPUT<x>."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.echo(request) for request in requests]

    def echo(self, request):
        tensors = [
            pb_utils.Tensor(tensor.name().replace("INPUT", "OUTPUT"), np.array(tensor.as_numpy()))
            for tensor in request.inputs()
        ]
        return pb_utils.InferenceResponse(tensors)
