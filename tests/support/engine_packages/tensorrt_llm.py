"""A package in the place of TensorRT-LLM, with the calls of its LLM API that Triton's model and our adapter make.

Its model says the prompt again, a token at a time, over and over; the tokens of a text are its characters.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import types
import typing

__version__ = "1.2.0"
__path__: list[str] = []
STEP_S = 0.002


@dataclasses.dataclass
class GuidedDecodingParams:
    json: str | dict | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int = 1
    best_of: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True


@dataclasses.dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclasses.dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestOutput:
    """Grows while it is iterated, as the real one does: outputs are all so far."""

    def __init__(
        self, ids: list[int], params: SamplingParams, is_text: bool, is_streamed: bool, said: list[int]
    ) -> None:
        self.prompt_token_ids = ids
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.cached_tokens = 0
        self._params, self._is_text, self._is_streamed, self._said = params, is_text, is_streamed, said
        self._is_aborted = False

    def abort(self) -> None:
        self._is_aborted = True
        print("aborted a request", flush=True)

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        output, params = self.outputs[0], self._params
        while True:
            await asyncio.sleep(STEP_S)
            if self._is_aborted:
                self.finished, output.finish_reason = True, "cancelled"
                return self
            token = self._said[len(output.token_ids) % len(self._said)]
            if token in (params.stop_token_ids or ()) or (token == params.end_id and not params.ignore_eos):
                self.finished, output.finish_reason, output.stop_reason = True, "stop", token
                return self
            output.token_ids.append(token)
            if params.logprobs is not None:
                output.logprobs.append(
                    {token: Logprob(-0.5, 1)} | {600 + n: Logprob(-n - 2.0, n + 2) for n in range(params.logprobs)}
                )
            if self._is_text:
                output.text += chr(token)
            if len(output.token_ids) >= params.max_tokens:
                self.finished, output.finish_reason = True, "length"
            if self.finished or self._is_streamed:
                return self


class LLM:
    def __init__(self, model: str, **arguments: object) -> None:
        if "broken" in model:
            raise RuntimeError("no such weights")
        self.arguments = arguments

    def generate_async(
        self,
        inputs: str | list[int],
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        ids = list(map(ord, inputs)) if isinstance(inputs, str) else list(inputs)
        said = ids if lora_request is None else ids[::-1]
        return RequestOutput(ids, sampling_params or SamplingParams(), isinstance(inputs, str), streaming, said)

    def shutdown(self) -> None:
        print("shut down", flush=True)


_PLACES: dict[str, dict[str, typing.Any]] = {
    "_utils": {"global_mpi_rank": lambda: 0, "global_mpi_size": lambda: 1},
    "_torch": {},
    "_torch.llm": {"LLM": LLM},
    "_tensorrt_engine": {"LLM": LLM},
    "llmapi": {"LLM": LLM, "GuidedDecodingParams": GuidedDecodingParams},
    "llmapi.llm": {"RequestOutput": RequestOutput},
    "llmapi.llm_utils": {"update_llm_args_with_extra_dict": lambda arguments, more: arguments | more},
    "executor": {},
    "executor.request": {"LoRARequest": LoRARequest},
    "sampling_params": {"GuidedDecodingParams": GuidedDecodingParams, "SamplingParams": SamplingParams},
}
for _name, _contents in _PLACES.items():
    sys.modules[f"{__name__}.{_name}"] = _module = types.ModuleType(f"{__name__}.{_name}")
    _module.__dict__.update(_contents)
