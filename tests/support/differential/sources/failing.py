"""Fails in the way that its input names; "fine" does not."""

import numpy as np
import triton_python_backend_utils as pb_utils

CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")


def fine():
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([b"fine"], dtype=object))])


class TritonPythonModel:
    def execute(self, requests):
        way = pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()[0].decode()
        if way == "raise":
            raise ValueError("the model's own words")
        if way == "raise model exception":
            raise pb_utils.TritonModelException("an exception of pb_utils")
        if way == "no list":
            return fine()
        if way == "none":
            return None
        if way == "too few":
            return []
        if way == "too many":
            return [fine()] * (len(requests) + 1)
        if way == "no response":
            return ["a string"] * len(requests)
        if way == "exit":
            import os

            os._exit(3)
        return [self.answer(way) for _ in requests]

    def answer(self, way):
        if way in CODES:
            code = getattr(pb_utils.TritonError, way)
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"with code {way}", code))
        if way == "error":
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError("an error without a code"))
        if way == "no output":
            return pb_utils.InferenceResponse([])
        if way == "other output":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OTHER", np.array([1], np.int32))])
        if way == "other datatype":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([1], np.int32))])
        if way == "other shape":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[b"a", b"b"]], dtype=object))])
        if way == "bad tensor":
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", [1, 2])])
        if way == "bad parameters":
            return pb_utils.InferenceResponse([], parameters={"list": [1]})
        if way == "float parameter":
            return pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", np.array([b"fine"], dtype=object))], parameters={"half": 0.5}
            )
        return fine()
