"""A sequence: the sum of what came since START, with the controls it was given."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        def value(name):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy().ravel()[0]

        start, end, ready, who = (value(name) for name in ("START", "END", "READY", "CORRID"))
        if start:
            self.sums[who] = 0
        self.sums[who] = self.sums.get(who, 0) + int(value("INPUT"))
        controls = np.array([[int(start), int(end), int(ready), int(who)]], np.int64)
        total = np.array([[self.sums[who]]], np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total), pb_utils.Tensor("CONTROLS", controls)])
