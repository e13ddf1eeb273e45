"""A package in the place of SGLang, with the calls that our adapter makes.

Its model says the prompt again, a token at a time, over and over. With an adapter it says the prompt backwards.
"""

from __future__ import annotations

import asyncio
import typing

__version__ = "0.5.23"
STEP_S = 0.002
_SAMPLING = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
        *("ignore_eos", "max_new_tokens", "min_new_tokens", "stop_token_ids", "skip_special_tokens", "sampling_seed"),
        *("logit_bias", "json_schema", "regex", "ebnf"),
    )
)


class _Requests:
    def __init__(self) -> None:
        self.aborted: set[str] = set()

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted.add(rid)
        print(f"aborted {rid}", flush=True)


class Engine:
    def __init__(self, model_path: str, context_length: int = 0, tp_size: int = 1, **arguments: typing.Any) -> None:
        if "broken" in model_path:
            raise RuntimeError("no such weights")
        print(f"context_length={context_length} {sorted(arguments)}", flush=True)
        self.adapters = arguments.get("lora_paths", {})
        self.tokenizer_manager = _Requests()

    async def async_generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, typing.Any],
        stream: bool = False,
        rid: str = "",
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        lora_path: str | None = None,
        priority: int | None = None,
    ) -> typing.AsyncIterator[dict[str, typing.Any]]:
        return self._generate(input_ids, sampling_params, rid, top_logprobs_num if return_logprob else None, lora_path)

    async def _generate(
        self, ids: list[int], params: dict[str, typing.Any], rid: str, num_top: int | None, lora_path: str | None
    ) -> typing.AsyncGenerator[dict[str, typing.Any]]:
        if unknown := params.keys() - _SAMPLING:
            raise ValueError(f"unknown sampling parameters: {unknown}")
        if lora_path is not None and lora_path not in self.adapters:
            raise ValueError(f"no adapter {lora_path}")
        said = ids if lora_path is None else ids[::-1]
        so_far: list[int] = []
        meta: dict[str, typing.Any] = {"finish_reason": None, "cached_tokens": 1, "completion_tokens": 0}
        if num_top is not None:
            meta |= {"output_token_logprobs": [], "output_top_logprobs": []}
        while meta["finish_reason"] is None:
            await asyncio.sleep(STEP_S)
            if rid in self.tokenizer_manager.aborted:
                return
            token = said[len(so_far) % len(said)]
            so_far.append(token)
            meta["completion_tokens"] = len(so_far)
            if num_top is not None:
                meta["output_token_logprobs"].append((-0.5, token, None))
                meta["output_top_logprobs"].append([(-0.5, token, None), (-2.0, 0, None)][:num_top])
            if token in params["stop_token_ids"]:
                meta["finish_reason"] = {"type": "stop", "matched": token}
            elif len(so_far) >= params["max_new_tokens"]:
                meta["finish_reason"] = {"type": "length", "length": len(so_far)}
            # As the real one: the list goes on growing.
            yield {"text": None, "output_ids": so_far, "meta_info": dict(meta)}

    def shutdown(self) -> None:
        print("shut down", flush=True)
