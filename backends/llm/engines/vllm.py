"""vLLM's asynchronous engine (`vllm.v1.engine.async_llm.AsyncLLM`), for versions from 0.11 on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from modelserver.backend import InternalError

from ..sequence import FinishReason
from .library import USUAL_SAMPLING, Asked, Library, News, logprobs_of


class VllmLibrary(Library):
    argument_names = {  # noqa: RUF012 - constant
        name: name
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_logprobs",
            "scheduling_policy",
            "tensor_parallel_size",
            "enable_lora",
            "max_loras",
            "max_lora_rank",
        )
    }
    sampling_names = USUAL_SAMPLING | {"bad_words", "logit_bias", "allowed_token_ids", "prompt_logprobs"}

    async def start(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(model=self.engine.model, **self.arguments()))

    async def generate(self, asked: Asked) -> AsyncGenerator[News]:
        from vllm.lora.request import LoRARequest

        params = asked.params
        adapter = asked.adapter
        prompt: dict[str, Any] = {"prompt_token_ids": asked.prompt_token_ids}
        if asked.cache_salt:
            prompt["cache_salt"] = asked.cache_salt
        stream = self._llm.generate(
            prompt,
            self._sampling(asked),
            asked.request_id,
            lora_request=None if adapter is None else LoRARequest(adapter.name, adapter.number, adapter.place),
            priority=asked.priority,
        )
        has_ended = False
        try:
            async with aclosing(stream):
                async for output in stream:
                    (choice,) = output.outputs
                    has_ended = choice.finish_reason is not None
                    if choice.finish_reason not in (None, "stop", "length"):
                        raise InternalError(f"vLLM ended the request: {choice.finish_reason}")
                    token_ids = list(choice.token_ids)
                    found = (choice.logprobs or ())[-len(token_ids) :] if token_ids else ()
                    prompt_logprobs = [
                        None if each is None else logprobs_of(token_id, each, params.prompt_logprobs or 0)
                        for token_id, each in zip(asked.prompt_token_ids, output.prompt_logprobs or (), strict=False)
                    ]
                    yield News(
                        token_ids,
                        [
                            logprobs_of(token_id, each, params.logprobs or 0)
                            for token_id, each in zip(token_ids, found, strict=bool(found))
                        ]
                        if found
                        else (),
                        None if choice.finish_reason is None else FinishReason(choice.finish_reason),
                        choice.stop_reason,
                        output.num_cached_tokens or 0,
                        prompt_logprobs,
                    )
        finally:
            if not has_ended:
                await self._llm.abort(asked.request_id)

    async def stop(self) -> None:
        self._llm.shutdown()

    def is_dead(self, error: BaseException) -> bool:
        return type(error).__name__ == "EngineDeadError"

    @staticmethod
    def _sampling(asked: Asked) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        params = asked.params
        given: dict[str, Any] = {
            name: getattr(params, name)
            for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty")
        }
        if params.structured_outputs is not None:
            given["structured_outputs"] = StructuredOutputsParams(**params.structured_outputs)
        if params.allowed_token_ids is not None:
            given["allowed_token_ids"] = list(params.allowed_token_ids)
        return SamplingParams(
            **given,
            presence_penalty=params.presence_penalty,
            seed=params.seed,
            logit_bias=dict(params.logit_bias) or None,
            bad_words=list(params.bad_words) or None,
            max_tokens=asked.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=list(asked.stop_token_ids),
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
