"""TensorRT-LLM's LLM API (`tensorrt_llm.LLM`), from version 1.0 on; its `backend: tensorrt` takes engine files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from modelserver.backend import InternalError, UnsupportedError

from ..sequence import FinishReason
from ..structured_outputs import Asked as AskedStructure
from .library import USUAL_SAMPLING, Asked, Library, News, logprobs_of


class TensorRtLibrary(Library):
    argument_names = {  # noqa: RUF012 - constant
        "max_model_len": "max_seq_len",
        "max_num_seqs": "max_batch_size",
        "tensor_parallel_size": "tensor_parallel_size",
        "enable_lora": "enable_lora",
    }
    sampling_names = USUAL_SAMPLING

    async def start(self) -> None:
        arguments = {"skip_tokenizer_init": True, **self.arguments()}
        if arguments.get("backend") == "tensorrt":
            from tensorrt_llm._tensorrt_engine import LLM

            del arguments["backend"]
        else:
            from tensorrt_llm import LLM
        # It starts processes and waits for them.
        make = partial(LLM, model=self.engine.model, **arguments)
        self._llm: Any = await asyncio.get_running_loop().run_in_executor(None, make)

    async def generate(self, asked: Asked) -> AsyncGenerator[News]:
        params, adapter = asked.params, asked.adapter
        more: dict[str, Any] = {"cache_salt": asked.cache_salt} if asked.cache_salt else {}
        if adapter is not None:
            from tensorrt_llm.executor.request import LoRARequest

            more["lora_request"] = LoRARequest(adapter.name, adapter.number, adapter.place)
        generation = self._llm.generate_async(
            asked.prompt_token_ids, sampling_params=self._sampling(asked), streaming=True, **more
        )
        num_taken, has_ended = 0, False
        try:
            async for output in generation:
                (choice,) = output.outputs
                reason = choice.finish_reason
                has_ended = bool(output.finished)
                if reason not in (None, "stop", "length"):
                    raise InternalError(f"TensorRT-LLM ended the request: {reason}")
                new = list(choice.token_ids[num_taken:])
                found = (choice.logprobs or ())[num_taken : num_taken + len(new)] if params.logprobs is not None else ()
                num_taken += len(new)
                yield News(
                    new,
                    [
                        logprobs_of(token_id, each, params.logprobs or 0)
                        for token_id, each in zip(new, found, strict=False)
                    ],
                    FinishReason(reason) if has_ended and reason is not None else None,
                    choice.stop_reason,
                    getattr(output, "cached_tokens", 0) or 0,
                )
        finally:
            if not has_ended:
                generation.abort()

    async def stop(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._llm.shutdown)

    def is_dead(self, error: BaseException) -> bool:
        return type(error).__name__ in ("RequestError", "CppExecutorError") and "shutdown" in str(error).lower()

    @staticmethod
    def _sampling(asked: Asked) -> Any:
        from tensorrt_llm import SamplingParams

        params = asked.params
        end_id = next(iter(asked.eos_token_ids), -1)
        # At temperature 0 it divides by it: the most probable token is the best of one.
        given: dict[str, Any] = {"top_k": 1} if params.is_greedy else {"temperature": params.temperature}
        if not params.is_greedy and params.top_k > 0:
            given["top_k"] = params.top_k
        for name, neutral in _NEUTRAL.items():
            if (value := getattr(params, name)) != neutral:
                given[name] = value
        if params.structured_outputs is not None:
            from tensorrt_llm.llmapi import GuidedDecodingParams

            structure = AskedStructure.of(params.structured_outputs)
            if structure.kind == "choice":
                raise UnsupportedError("structured output: TensorRT-LLM has no choice; give a regex or a grammar")
            given["guided_decoding"] = GuidedDecodingParams(**{structure.kind: structure.what})
        return SamplingParams(
            **given,
            end_id=end_id,
            pad_id=end_id,
            max_tokens=asked.max_tokens,
            stop_token_ids=[token_id for token_id in asked.stop_token_ids if token_id != end_id] or None,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            detokenize=False,
        )


_NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_tokens": 0,
    "seed": None,
}
