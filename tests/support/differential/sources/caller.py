"""BLS: calls the model that it is told, in the way that it is told, and tells what came back as JSON."""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils

CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")


def told(response):
    if response.has_error():
        return {"error": response.error().message().splitlines()[0], "code": code_name(response.error().code())}
    return {"outputs": {tensor.name(): plain(tensor.as_numpy()) for tensor in response.output_tensors()}}


def code_name(code):
    return next(name for name in CODES if getattr(pb_utils.TritonError, name) == code)


def plain(array):
    return [each.decode() for each in array.ravel()] if array.dtype == object else array.tolist()


class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            way = json.loads(pb_utils.get_input_tensor_by_name(request, "WAY").as_numpy()[0])
            try:
                answer = await self.answer(way)
            except Exception as error:
                answer = {"raised": type(error).__name__, "text": str(error)}
            text = np.array([json.dumps(answer).encode()], dtype=object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", text)]))
        return responses

    async def answer(self, way):
        if "ready" in way:
            return {"ready": pb_utils.is_model_ready(way["ready"], way.get("version", ""))}
        if way.get("times"):
            calls = [self.request(way).async_exec() for _ in range(way["times"])]
            return [told(response) for response in await asyncio.gather(*calls)]
        if way.get("decoupled"):
            responses = await self.request(way).async_exec(decoupled=True)
            return [told(response) for response in responses]
        if way.get("async"):
            return told(await self.request(way).async_exec())
        return told(self.request(way).exec())

    def request(self, way):
        inputs = [
            pb_utils.Tensor(name, np.array(values, dtype=object if datatype == "BYTES" else datatype))
            for name, (datatype, values) in way["inputs"].items()
        ]
        return pb_utils.InferenceRequest(
            model_name=way["model"],
            model_version=way.get("version", -1),
            requested_output_names=way["outputs"],
            inputs=inputs,
            request_id=way.get("id", ""),
            parameters=way.get("parameters"),
        )
