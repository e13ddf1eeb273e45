"""A backend over TensorRT-LLM in the manner of Triton's: model.yaml has the engine's arguments and parts of the config,
and a thread looks for requests whose clients have left. It makes the calls that Triton's file for the LLM API makes.
"""

import asyncio
import json
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
import yaml

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def _described():
    arguments = yaml.safe_load(Path(pb_utils.get_model_dir(), "model.yaml").read_text())
    return arguments.pop("triton_config"), arguments


def _value(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().item(0)


class TritonPythonModel:
    @classmethod
    def auto_complete_config(cls, config):
        ours, _ = _described()
        config.set_model_transaction_policy({"decoupled": bool(ours["decoupled"])})
        config.set_max_batch_size(int(ours["max_batch_size"]))
        return config

    def initialize(self, args):
        from tensorrt_llm import LLM, SamplingParams
        from tensorrt_llm._utils import global_mpi_rank
        from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict

        assert global_mpi_rank() == 0
        self.params_class = SamplingParams
        output = pb_utils.get_output_config_by_name(json.loads(args["model_config"]), "text_output")
        self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
        _, arguments = _described()
        self.llm = LLM(**update_llm_args_with_extra_dict({}, arguments))
        self.running, self.lock, self.is_open = {}, threading.Lock(), True
        self.loop = asyncio.new_event_loop()
        self.threads = [threading.Thread(target=self.loop.run_forever), threading.Thread(target=self._look_for_leavers)]
        for thread in self.threads:
            thread.start()

    def _look_for_leavers(self):
        while self.is_open:
            time.sleep(0.02)
            with self.lock:
                for request, generation in list(self.running.items()):
                    if request.is_cancelled():
                        generation.abort()
                        error = pb_utils.TritonError("Request cancelled by client", pb_utils.TritonError.CANCELLED)
                        request.get_response_sender().send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                        del self.running[request]

    def execute(self, requests):
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._generate(request), self.loop)

    async def _generate(self, request):
        sender = request.get_response_sender()
        try:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            params = self.params_class(max_tokens=_value(request, "sampling_param_max_tokens") or 4)
            is_streamed = bool(_value(request, "streaming"))
            generation = self.llm.generate_async(text, params, is_streamed)
            with self.lock:
                self.running[request] = generation
            async for output in generation:
                if is_streamed and request in self.running:
                    sender.send(self._response(output), flags=FINAL if output.finished else 0)
            if not is_streamed and request in self.running:
                sender.send(self._response(output), flags=FINAL)
        except Exception as error:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), flags=FINAL)
        finally:
            with self.lock:
                self.running.pop(request, None)

    def _response(self, output):
        texts = [choice.text.encode() for choice in output.outputs]
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.asarray(texts, dtype=self.dtype))])

    def finalize(self):
        self.is_open = False
        self.loop.call_soon_threadsafe(self.loop.stop)
        for thread in self.threads:
            thread.join()
        self.llm.shutdown()
