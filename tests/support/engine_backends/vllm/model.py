"""A backend over vLLM in the manner of Triton's: it completes the config, runs the engine's event loop in a thread,
executes requests there, and streams from a second thread. It makes the calls that Triton's file makes.
"""

import asyncio
import json
import queue
import threading
from pathlib import Path

import triton_python_backend_utils as pb_utils
from vllm.engine.arg_utils import AsyncEngineArgs
from wording.requests import INPUTS, OUTPUTS, Generation
from wording.stats import LoggerFactory

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    @classmethod
    def auto_complete_config(cls, config):
        listed = config.as_dict()
        known = {entry["name"] for entry in (*listed["input"], *listed["output"])}
        for name, kind in INPUTS.items():
            if name not in known:
                config.add_input({"name": name, "data_type": kind, "dims": [1], "optional": name != "text_input"})
        for name, kind in OUTPUTS.items():
            if name not in known:
                config.add_output({"name": name, "data_type": kind, "dims": [-1]})
        config.set_model_transaction_policy({"decoupled": True})
        config.set_max_batch_size(0)
        return config

    def initialize(self, args):
        self.args, self.logger = args, pb_utils.Logger
        self.config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(self.config):
            raise ValueError("this backend streams")
        directory = Path(pb_utils.get_model_dir())
        arguments = json.loads((directory / "model.json").read_text())
        self.adapters = {}
        if arguments.get("enable_lora"):
            self.adapters = json.loads((directory / "multi_lora.json").read_text())
        self.loggers = []
        if self._is_on("REPORT_CUSTOM_METRICS"):
            self.loggers.append(LoggerFactory({"model": args["model_name"], "version": args["model_version"]}))
        self.arguments = AsyncEngineArgs(**arguments)
        self.engine, self.failure = None, None
        self.started, self.stopping = threading.Event(), asyncio.Event()
        self.loop_thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self.loop_thread.start()
        self.started.wait()
        if self.failure is not None:
            self.loop_thread.join()
            raise self.failure
        tasks = self.engine.get_supported_tasks()
        self.tasks = asyncio.run_coroutine_threadsafe(tasks, self.loop).result()
        self.answers = queue.Queue()
        self.answer_thread = threading.Thread(target=self._send_all)
        self.answer_thread.start()

    def _is_on(self, name):
        return self.config["parameters"].get(name, {}).get("string_value", "").lower() == "true"

    async def _serve(self):
        from vllm.v1.engine.async_llm import AsyncLLM

        self.loop = asyncio.get_running_loop()
        try:
            self.engine = AsyncLLM.from_vllm_config(
                vllm_config=self.arguments.create_engine_config(), stat_loggers=self.loggers
            )
            await self.engine.reset_mm_cache()
        except Exception as error:
            self.failure = error
            return
        finally:
            self.started.set()
        await self.stopping.wait()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        self.engine.shutdown()

    def execute(self, requests):
        if self._is_on("ENABLE_VLLM_HEALTH_CHECK"):
            asyncio.run_coroutine_threadsafe(self.engine.check_health(), self.loop).result()
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._generate(request), self.loop)

    async def _generate(self, request):
        sender = request.get_response_sender()
        try:
            generation = Generation(request, self.adapters)
            state = {"is_cancelled": False}
            output = None
            async for output in generation.outputs(self.engine):
                if state["is_cancelled"] or (not generation.stream and sender.is_cancelled()):
                    await self.engine.abort(generation.id)
                    error = pb_utils.TritonError("Request was cancelled", pb_utils.TritonError.CANCELLED)
                    sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                    return
                if generation.stream:
                    flags = FINAL if output.finished else 0
                    self.answers.put((sender, state, generation.response(output), flags))
            if not generation.stream:
                sender.send(generation.response(output), flags=FINAL)
        except Exception as error:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))), flags=FINAL)

    def _send_all(self):
        while (answer := self.answers.get()) is not None:
            sender, state, response, flags = answer
            sender.send(response, flags)
            if not flags:
                state["is_cancelled"] = sender.is_cancelled()

    def finalize(self):
        self.loop.call_soon_threadsafe(self.stopping.set)
        self.loop_thread.join()
        self.answers.put(None)
        self.answer_thread.join()
        for factory in self.loggers:
            factory.stop()
        self.logger.log_info("the engine is shut down")
