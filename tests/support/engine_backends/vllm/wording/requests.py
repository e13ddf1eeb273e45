"""What a request says and how it is answered."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid

INPUTS = {
    "text_input": "TYPE_STRING",
    "stream": "TYPE_BOOL",
    "sampling_parameters": "TYPE_STRING",
    "return_finish_reason": "TYPE_BOOL",
}
OUTPUTS = {"text_output": "TYPE_STRING", "finish_reason": "TYPE_STRING"}


class Generation:
    def __init__(self, request, adapters):
        self.id = random_uuid()
        self.text = self._value(request, "text_input").decode()
        self.stream = bool(self._value(request, "stream"))
        self.wants_reason = bool(self._value(request, "return_finish_reason"))
        given = self._value(request, "sampling_parameters")
        values = json.loads(given if given is not None else request.parameters())
        name = values.pop("lora_name", None)
        if name is not None and name not in adapters:
            raise ValueError(f"LoRA {name} is not supported, we currently support {list(adapters)}")
        self.adapter = None if name is None else LoRARequest(name, list(adapters).index(name) + 1, adapters[name])
        self.params = SamplingParams(**values)
        self._num_sent = 0

    @staticmethod
    def _value(request, name):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return tensor.as_numpy()[0] if tensor else None

    async def outputs(self, engine):
        async for output in engine.generate(self.text, self.params, self.id, lora_request=self.adapter):
            yield output

    def response(self, output):
        (choice,) = output.outputs
        text, self._num_sent = choice.text[self._num_sent :], len(choice.text)
        tensors = [pb_utils.Tensor("text_output", np.asarray([text.encode()], dtype=np.object_))]
        if self.wants_reason:
            reason = np.asarray([str(choice.finish_reason)], dtype=np.object_)
            tensors.append(pb_utils.Tensor("finish_reason", reason))
        return pb_utils.InferenceResponse(output_tensors=tensors)
