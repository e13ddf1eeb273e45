"""SGLang's engine (`sglang.Engine`), for versions from 0.5 on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson

from modelserver.backend import InternalError, InvalidArgumentError, UnsupportedError

from ..plan import TokenLogprobs
from ..sequence import FinishReason
from ..structured_outputs import Asked as AskedStructure
from .library import USUAL_SAMPLING, Asked, Library, News


class SglangLibrary(Library):
    argument_names = {  # noqa: RUF012 - constant
        "max_model_len": "context_length",
        "max_num_seqs": "max_running_requests",
        "tensor_parallel_size": "tp_size",
        "enable_lora": "enable_lora",
        "max_loras": "max_loras_per_batch",
        "max_lora_rank": "max_lora_rank",
    }
    sampling_names = USUAL_SAMPLING | {"logit_bias"}

    async def start(self) -> None:
        import sglang

        arguments = {"model_path": self.engine.model, **self.arguments()}
        if self.options.serves_adapters:
            arguments.setdefault("lora_paths", dict(self.options.lora_modules))
        # It starts processes and waits for them; later it takes the loop on which it is first asked.
        make = partial(sglang.Engine, **arguments)
        self._llm: Any = await asyncio.get_running_loop().run_in_executor(None, make)

    async def generate(self, asked: Asked) -> AsyncGenerator[News]:
        params, adapter = asked.params, asked.adapter
        if adapter is not None and adapter.name not in dict(self.options.lora_modules):
            raise UnsupportedError(
                f"the adapter '{adapter.name}' was loaded while the model serves, and SGLang is given adapters at its "
                "start only: list it in lora_modules"
            )
        more: dict[str, Any] = {"cache_salt": asked.cache_salt} if asked.cache_salt else {}
        if params.logprobs is not None:
            more |= {"return_logprob": True, "top_logprobs_num": params.logprobs}
        if adapter is not None:
            more["lora_path"] = adapter.name
        if asked.priority:
            more["priority"] = asked.priority
        stream = await self._llm.async_generate(
            input_ids=asked.prompt_token_ids,
            sampling_params=self._sampling(asked),
            stream=True,
            rid=asked.request_id,
            **more,
        )
        num_taken, has_ended = 0, False
        try:
            async with aclosing(stream):
                async for output in stream:
                    meta = output["meta_info"]
                    # All tokens so far, of a list that still grows; or only the new ones, by its option
                    # `incremental_streaming_output`.
                    so_far = output["output_ids"]
                    num_tokens = meta["completion_tokens"]
                    new = list(so_far[num_taken:] if len(so_far) >= num_tokens else so_far)
                    num_taken += len(new)
                    ended = meta.get("finish_reason")
                    has_ended = ended is not None
                    if ended is not None and ended["type"] not in ("stop", "length"):
                        message = f"SGLang ended the request: {ended.get('message') or ended['type']}"
                        is_wrong = ended.get("status_code") == 400
                        raise InvalidArgumentError(message) if is_wrong else InternalError(message)
                    stop_reason = None if ended is None else ended.get("matched")
                    yield News(
                        new,
                        _logprobs(meta, new, params.logprobs or 0) if params.logprobs is not None and new else (),
                        None if ended is None else FinishReason(ended["type"]),
                        stop_reason,
                        meta.get("cached_tokens") or 0,
                    )
        finally:
            if not has_ended:
                self._llm.tokenizer_manager.abort_request(rid=asked.request_id)

    async def stop(self) -> None:
        self._llm.shutdown()

    def is_dead(self, error: BaseException) -> bool:
        return isinstance(error, BrokenPipeError | ConnectionError)

    @staticmethod
    def _sampling(asked: Asked) -> dict[str, Any]:
        params = asked.params
        given: dict[str, Any] = {
            name: getattr(params, name)
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "frequency_penalty",
                "presence_penalty",
                "ignore_eos",
            )
        }
        given |= {
            "top_k": params.top_k or -1,
            "max_new_tokens": asked.max_tokens,
            "min_new_tokens": params.min_tokens,
            "stop_token_ids": list(asked.stop_token_ids),
            "skip_special_tokens": False,
        }
        if params.seed is not None:
            given["sampling_seed"] = params.seed
        if params.logit_bias:
            given["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        if params.structured_outputs is not None:
            asked_structure = AskedStructure.of(params.structured_outputs)
            kind, what = asked_structure.kind, asked_structure.what
            if kind == "choice":
                raise UnsupportedError("structured output: SGLang has no choice; give a regex or a grammar")
            if kind in ("json", "json_object"):
                schema = {"type": "object"} if kind == "json_object" else what
                given["json_schema"] = orjson.dumps(schema).decode()
            else:
                given["ebnf" if kind == "grammar" else "regex"] = what
        return given


def _logprobs(meta: dict[str, Any], new: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """SGLang does not say the rank of a token: that among the best, or else one more than these are."""
    own = meta["output_token_logprobs"][-len(new) :]
    tops = (meta.get("output_top_logprobs") or [None] * len(own))[-len(new) :]
    found = []
    for (logprob, token_id, _), best in zip(own, tops, strict=True):
        top = tuple((each, value) for value, each, _ in (best or ())[:num_top])
        ranks = [rank for rank, (each, _) in enumerate(top, 1) if each == token_id]
        found.append(TokenLogprobs(logprob, ranks[0] if ranks else len(top) + 1, top))
    return found
