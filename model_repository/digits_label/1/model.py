"""Probabilities of ten digits -> the word for the likeliest one, and how likely it is."""

import numpy as np
import triton_python_backend_utils as pb_utils

WORDS = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], dtype=object)


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        probabilities = pb_utils.get_input_tensor_by_name(request, "probabilities").as_numpy()
        digits = probabilities.argmax(axis=1)
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("label", WORDS[digits][:, np.newaxis]),
                pb_utils.Tensor("confidence", probabilities.max(axis=1, keepdims=True)),
            ]
        )
