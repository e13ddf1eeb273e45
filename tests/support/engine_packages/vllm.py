"""A package in the place of vLLM, with the calls that Triton's vLLM backend and our adapter make.

Its model says the prompt again, a token at a time, over and over; the tokens of a text are its characters. With an
adapter it says the prompt backwards. A sampling parameter that the real one does not know is a TypeError.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import sys
import types
import typing
import uuid

__version__ = "0.33.0"
__path__: list[str] = []
STEP_S = 0.002


@dataclasses.dataclass
class AsyncEngineArgs:
    model: str = "facebook/opt-125m"
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    tensor_parallel_size: int = 1
    skip_tokenizer_init: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_logprobs: int = 20
    scheduling_policy: str = "fcfs"
    disable_log_stats: bool = False
    enable_log_requests: bool = False
    aggregate_engine_logging: bool = False

    def create_engine_config(self, usage_context: object = None) -> VllmConfig:
        return VllmConfig(types.SimpleNamespace(max_model_len=self.max_model_len or 2048), self)


@dataclasses.dataclass
class VllmConfig:
    model_config: types.SimpleNamespace
    arguments: AsyncEngineArgs


class UsageContext(enum.Enum):
    OPENAI_API_SERVER = "openai"


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclasses.dataclass
class StructuredOutputsParams:
    json: str | dict | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False


class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: typing.Any = None
    stop_token_ids: typing.Any = None
    bad_words: typing.Any = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    logit_bias: typing.Any = None
    allowed_token_ids: typing.Any = None
    structured_outputs: typing.Any = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __init__(self, **values: object) -> None:
        for name, value in values.items():
            if not hasattr(type(self), name):
                raise TypeError(f"SamplingParams got an unexpected keyword argument {name!r}")
            setattr(self, name, value)


@dataclasses.dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: typing.Any = None
    num_cached_tokens: int = 0


@dataclasses.dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class EngineDeadError(Exception):
    pass


class StatLoggerBase:
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config


def build_1_2_5_buckets(most: int) -> list[int]:
    return [m * 10**e for e in range(len(str(most))) for m in (1, 2, 5) if m * 10**e <= most]


class AsyncLLM:
    def __init__(self, config: VllmConfig, stat_loggers: list | None = None) -> None:
        self.config = config
        if "broken" in config.arguments.model:
            raise RuntimeError("no such weights")
        self._loggers = [make(config, 0) for make in stat_loggers or ()]
        self._aborted: set[str] = set()
        self._is_dead = False

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig, stat_loggers: list | None = None, **_: object) -> AsyncLLM:
        return cls(vllm_config, stat_loggers)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, **_: object) -> AsyncLLM:
        return cls(engine_args.create_engine_config())

    async def reset_mm_cache(self) -> None: ...

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def check_health(self) -> None:
        if self._is_dead:
            raise RuntimeError("the engine is dead")

    def shutdown(self) -> None:
        self._is_dead = True

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)
        print(f"aborted {request_id}", flush=True)

    async def generate(
        self,
        prompt: str | dict,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> typing.AsyncGenerator[RequestOutput]:
        text = prompt if isinstance(prompt, str) else prompt.get("prompt")
        ids = [ord(letter) for letter in text] if text is not None else list(prompt["prompt_token_ids"])
        if ids == [13, 13, 13]:
            raise EngineDeadError("it ran out of memory")
        said = ids[::-1] if lora_request is not None else ids
        params = sampling_params
        most = params.max_tokens or 1_000_000
        sent = RequestOutput(request_id, text, ids, [], False)
        sofar: list[int] = []
        for index in range(most):
            await asyncio.sleep(STEP_S)
            if request_id in self._aborted:
                return
            token = said[index % len(said)]
            sofar.append(token)
            is_stopped = token in (params.stop_token_ids or ()) and len(sofar) >= params.min_tokens
            reason = "stop" if is_stopped else "length" if index + 1 == most else None
            if params.output_kind is RequestOutputKind.FINAL_ONLY and reason is None:
                continue
            new = [token] if params.output_kind is RequestOutputKind.DELTA else list(sofar)
            logprobs = None
            if params.logprobs is not None:
                logprobs = [
                    {each: Logprob(-0.5, 1)}
                    | {600 + rank: Logprob(-float(rank + 2), rank + 2) for rank in range(params.logprobs)}
                    for each in new
                ]
            shown = "" if text is None else "".join(map(chr, new))
            output = CompletionOutput(0, shown, new, None, logprobs, reason, token if is_stopped else None)
            self._record(len(ids) if not index else 0, reason is not None, len(ids), len(sofar))
            yield dataclasses.replace(sent, outputs=[output], finished=reason is not None)
            if reason is not None:
                return

    def _record(self, num_prompt: int, is_end: bool, num_prompt_tokens: int, num_tokens: int) -> None:
        ended = types.SimpleNamespace(
            e2e_latency=0.1, num_prompt_tokens=num_prompt_tokens, num_generation_tokens=num_tokens
        )
        stats = types.SimpleNamespace(
            finished_requests=[ended] if is_end else [],
            num_prompt_tokens=num_prompt,
            num_generation_tokens=1,
            time_to_first_tokens_iter=[0.01] if num_prompt else [],
            inter_token_latencies_iter=[0.002],
            n_params_iter=[1] if is_end else [],
        )
        for logger in self._loggers:
            logger.record(None, stats, None, 0)


def _module(name: str, **contents: object) -> None:
    sys.modules[f"{__name__}.{name}"] = module = types.ModuleType(f"{__name__}.{name}")
    module.__dict__.update(contents)


_PLACES: dict[str, dict[str, object]] = {
    "engine": {},
    "engine.arg_utils": {"AsyncEngineArgs": AsyncEngineArgs},
    "engine.protocol": {"EngineClient": AsyncLLM},
    "sampling_params": {
        "SamplingParams": SamplingParams,
        "StructuredOutputsParams": StructuredOutputsParams,
        "RequestOutputKind": RequestOutputKind,
    },
    "usage": {},
    "usage.usage_lib": {"UsageContext": UsageContext},
    "v1": {},
    "v1.engine": {},
    "v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
    "v1.metrics": {},
    "v1.metrics.loggers": {
        "StatLoggerBase": StatLoggerBase,
        "StatLoggerFactory": typing.Callable,
        "build_1_2_5_buckets": build_1_2_5_buckets,
    },
    "v1.metrics.stats": {"IterationStats": object, "MultiModalCacheStats": object, "SchedulerStats": object},
    "config": {"VllmConfig": VllmConfig},
    "inputs": {},
    "inputs.data": {"TokensPrompt": dict},
    "lora": {},
    "lora.request": {"LoRARequest": LoRARequest},
    "outputs": {
        "RequestOutput": RequestOutput,
        "EmbeddingOutput": object,
        "EmbeddingRequestOutput": object,
        "PoolingRequestOutput": dict,
    },
    "pooling_params": {"PoolingParams": dict},
    "utils": {"random_uuid": lambda: uuid.uuid4().hex},
}
for _name, _contents in _PLACES.items():
    _module(_name, **_contents)
