"""Implicit state: adds its input to the state and answers with it."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        total = (
            pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            + pb_utils.get_input_tensor_by_name(request, "STATE_IN").as_numpy()
        )
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total), pb_utils.Tensor("STATE_OUT", total)])
