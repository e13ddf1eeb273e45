"""Sum and difference of two tensors."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        first = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        second = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", first + second), pb_utils.Tensor("OUTPUT1", first - second)]
        )
