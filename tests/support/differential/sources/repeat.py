"""Decoupled: answers with the input's first number of responses; a negative one fails after that many."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request)

    def answer(self, request):
        sender = request.get_response_sender()
        number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0])
        for index in range(abs(number)):
            value = np.array([index], np.int32)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        if number < 0:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("failed after its responses")))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
