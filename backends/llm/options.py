"""The options of one engine, named as vLLM names them: `parameters` of config.pbtxt, or keys of `model.json`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .embedding.layout import POOLINGS, pooling_of
from .json_fields import boolean, integer, number, string, strings, unknown, wrong
from .kv_events import KvEventsConfig, read_kv_events_config
from .nodes import Nodes
from .speculation.config import TRAINED, SpeculativeConfig, read_speculative_config

logger = logging.getLogger(__name__)

_PREFIX_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
# In a prompt.
_USUAL_PICTURES = 16
_USUAL_LORA_RANK, _USUAL_LORAS = 16, 8

# Sequences and tokens of a step, by the bytes of a GPU's memory: the first that it has. A step of a GPU takes about as
# long for its weights as for some hundred tokens, and sequences need keys and values, of which a small GPU holds few.
_GPU_SIZES = ((160 << 30, 1024, 16384), (70 << 30, 1024, 8192), (0, 256, 2048))
_SIZES = frozenset({"max_num_seqs", "max_num_batched_tokens"})

# In what keys and values are kept: as the network computes them, or as codes of 8 bits with a scale for each head of a
# token. vLLM has several names for these.
KV_CACHE_DTYPES = ("auto", "int8", "int8_per_token_head", "fp8", "fp8_e4m3", "fp8_per_token_head")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """None of an option: the engine decides, by the model and the device.

    `max_num_batched_tokens` bounds a step, `max_num_seqs` what runs at once, `max_model_len` prompt and output
    together (tokens). The first two are a CPU's until `for_gpu` sets those in `by_device`.
    `kv_cache_memory_bytes` bounds the pool of blocks where `num_gpu_blocks_override` does not say
    how many there are (one of them is for padding). `kv_cache_dtype` is one of `KV_CACHE_DTYPES`.
    `scheduling_policy` is "fcfs" or "priority" (lower goes first).
    `pooling`, `normalize` and `default_prompt_name` are of embeddings; None: as the checkpoint has it.
    `classifier_from_token`: a language model scores texts by these tokens as the next one, and generates nothing.
    `disable_any_whitespace`: structured JSON has no blanks between its elements, unless a request says otherwise.
    `limit_mm_per_prompt` pictures may be in a prompt, of `max_image_pixels` each before they are resized; embeddings of
    pictures are kept up to `mm_processor_cache_gb` (GiB).
    `lora_modules` are adapters: names, and where each lies. `enable_lora` None: if there are any. `max_loras` of them
    run at once, of ranks up to `max_lora_rank`, and `max_cpu_loras` are kept in host memory. `usual_adapters` are the
    names of those that requests get which name none.
    `kept_prefixes` are texts, conversations or token ids by names, whose keys and values are kept in files of
    `kept_prefix_directory` (None: in the user's cache). `kv_offloading_size` GiB of host memory keep blocks that the
    device's cache has no room for. `kv_events_config`: who is told which blocks the cache holds.
    `nodes`: the machines that share the ranks of `tensor_parallel_size`, as the server's flags say; None: this one.
    A step over several ranks may take `distributed_timeout_seconds`; 0: no limit.
    `structured_outputs_backend`: "guidance" or "xgrammar" compiles structured outputs; None: the installed one.

    Raises InvalidArgumentError, which names the option, when one is out of its range.
    """

    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    scheduling_policy: str = "fcfs"
    dtype: str = "auto"
    quantization: str | None = None
    seed: int = 0
    device: str = "auto"
    attention_backend: str = "auto"
    tensor_parallel_size: int = 1
    distributed_timeout_seconds: float = 300.0
    enforce_eager: bool = False
    capture_at_load: bool = True
    max_logprobs: int = 20
    num_threads: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    default_prompt_name: str | None = None
    classifier_from_token: tuple[str, ...] | None = None
    disable_any_whitespace: bool = False
    structured_outputs_backend: str | None = None
    speculative_config: SpeculativeConfig | None = None
    limit_mm_per_prompt: int = _USUAL_PICTURES
    max_image_pixels: int = 1 << 26
    mm_processor_cache_gb: float = 1.0
    enable_lora: bool | None = None
    lora_modules: tuple[tuple[str, str], ...] = ()
    usual_adapters: tuple[str, ...] = ()
    max_loras: int | None = None
    max_lora_rank: int | None = None
    max_cpu_loras: int | None = None
    kept_prefixes: Mapping[str, Any] = field(default_factory=dict)
    kept_prefix_directory: str | None = None
    kept_weights_directory: str | None = None
    kept_weights_gb: float = 32.0
    kv_offloading_size: float = 0.0
    kv_events_config: KvEventsConfig | None = None
    nodes: Nodes | None = None
    by_device: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        for name, (is_right, expected) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not is_right(value):
                raise wrong(name, expected, value)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise wrong(
                "max_num_batched_tokens",
                f"at least max_num_seqs ({self.max_num_seqs}), a token for each that runs",
                self.max_num_batched_tokens,
            )
        if self.max_model_len is not None:
            self.check_unchunked(self.max_model_len)

    @property
    def serves_adapters(self) -> bool:
        return bool(self.lora_modules) if self.enable_lora is None else self.enable_lora

    @property
    def lora_rank(self) -> int:
        """The greatest that an adapter may have."""
        return self.max_lora_rank or _USUAL_LORA_RANK

    @property
    def num_lora_slots(self) -> int:
        """How many adapters run at once."""
        return self.max_loras or _USUAL_LORAS

    @property
    def num_kept_loras(self) -> int:
        """How many adapters are kept in host memory."""
        return self.max_cpu_loras or max(self.num_lora_slots, 2 * _USUAL_LORAS)

    @property
    def has_trained_drafts(self) -> bool:
        """Whether a trained layer guesses tokens, which reads the states of layers."""
        return self.speculative_config is not None and self.speculative_config.method in TRAINED

    @property
    def chunk_len(self) -> int | None:
        """How many tokens of a sequence a step computes at most; None: all that are there."""
        return self.max_num_batched_tokens if self.enable_chunked_prefill else None

    def for_gpu(self, memory_bytes: int) -> EngineOptions:
        """The options on a GPU with that much memory: sizes that were not given are larger there."""
        seqs, tokens = next(sizes for least, *sizes in _GPU_SIZES if memory_bytes >= least)
        if "max_num_seqs" not in self.by_device:
            seqs = self.max_num_seqs
        if "max_num_batched_tokens" not in self.by_device:
            tokens = self.max_num_batched_tokens
            seqs = min(seqs, tokens)
        return replace(self, max_num_seqs=seqs, max_num_batched_tokens=max(seqs, tokens), by_device=frozenset())

    def check_unchunked(self, max_model_len: int) -> None:
        """Raise InvalidArgumentError if prompts are not cut into chunks and one of `max_model_len` has no step."""
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise wrong(
                "max_num_batched_tokens",
                f"at least the model's length ({max_model_len}) when enable_chunked_prefill is false",
                self.max_num_batched_tokens,
            )

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], *, others: Collection[str] = ()) -> EngineOptions:
        """From strings (config.pbtxt) or JSON values (model.json). `others` are parameters that are not the engine's.

        null, and "auto" where an option may be None, stand for the default. Raises InvalidArgumentError for a name that
        is none (with the one that was probably meant), and for a value of a wrong type or out of its range.
        """
        given: dict[str, Any] = {}
        for name, value in parameters.items():
            if name in CONVERTERS:
                if value is not None and not (name in AUTOMATIC and value in ("auto", "")):
                    given[name] = CONVERTERS[name](name, value)
            elif name in WITHOUT_MEANING:
                logger.info("engine option %s=%r is vLLM's and means nothing here", name, value)
            elif name in NEUTRAL:
                if value is not None and value not in NEUTRAL[name]:
                    allowed = [json.dumps(one) for one in NEUTRAL[name]]
                    raise wrong(name, f"{' or '.join([*allowed, 'absent'])}: this server does not support it", value)
            elif name not in others:
                raise unknown(name, CONVERTERS.keys() | set(others))
        return cls(**given, by_device=_SIZES - given.keys())


def picture_limit(name: str, value: Any) -> int:
    """A number, or vLLM's object of them by modality: {"image": 4}."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            raise wrong(name, 'a number, or an object such as {"image": 4}', value) from None
    if isinstance(value, dict):
        value = value.get("image", _USUAL_PICTURES)
        if isinstance(value, dict):
            value = value.get("count")
    return integer(name, value)


def _words(name: str, value: Any) -> tuple[str, ...]:
    """An array of texts, which config.pbtxt has as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise wrong(name, 'an array of texts, such as ["no", "yes"]', value)
    return tuple(value)


def _prefixes(name: str, value: Any) -> dict[str, Any]:
    """By names: texts, objects with `messages`, or lists of token ids. config.pbtxt has the object as JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, dict) or not all(_is_prefix(each) for each in value.values()):
        raise wrong(name, 'an object of texts, {"messages": [...]} or lists of token ids, by names', value)
    for each in value:
        if not _PREFIX_NAME.fullmatch(each):
            raise wrong(name, "names of 1 to 64 letters, digits, '_' and '-'", each)
    return dict(value)


def _is_prefix(value: Any) -> bool:
    if isinstance(value, dict):
        return value.keys() <= {"messages", "tools"} and bool(value.get("messages"))
    if isinstance(value, list):
        return all(type(token) is int for token in value)
    return isinstance(value, str) and bool(value)


def lora_places(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Adapters as vLLM has them: an object {name: path}, or a list of "name=path" or {"name": ..., "path": ...}."""
    expected = 'an object of paths by names, or a list of {"name": ..., "path": ...}'
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = value.split()
    entries = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(entries, list):
        raise wrong(name, expected, value)
    found: dict[str, str] = {}
    for entry in entries:
        pair = entry
        if isinstance(entry, dict):
            pair = entry.get("name"), entry.get("path")
        elif isinstance(entry, str):
            pair = tuple(entry.split("=", 1))
        if len(pair) != 2 or not all(isinstance(part, str) and part for part in pair) or pair[0] in found:
            raise wrong(name, f"{expected}, each name once", entry)
        found[pair[0]] = pair[1]
    return tuple(found.items())


CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "block_size": integer,
    "max_model_len": integer,
    "max_num_seqs": integer,
    "max_num_batched_tokens": integer,
    "enable_prefix_caching": boolean,
    "enable_chunked_prefill": boolean,
    "num_gpu_blocks_override": integer,
    "kv_cache_memory_bytes": integer,
    "kv_cache_dtype": string,
    "gpu_memory_utilization": number,
    "scheduling_policy": string,
    "dtype": string,
    "quantization": string,
    "seed": integer,
    "device": string,
    "attention_backend": string,
    "tensor_parallel_size": integer,
    "distributed_timeout_seconds": number,
    "enforce_eager": boolean,
    "capture_at_load": boolean,
    "max_logprobs": integer,
    "num_threads": integer,
    "pooling": string,
    "normalize": boolean,
    "default_prompt_name": string,
    "classifier_from_token": _words,
    "disable_any_whitespace": boolean,
    "structured_outputs_backend": string,
    "speculative_config": read_speculative_config,
    "limit_mm_per_prompt": picture_limit,
    "max_image_pixels": integer,
    "mm_processor_cache_gb": number,
    "enable_lora": boolean,
    "lora_modules": lora_places,
    "usual_adapters": strings,
    "max_loras": integer,
    "max_lora_rank": integer,
    "max_cpu_loras": integer,
    "kept_prefixes": _prefixes,
    "kept_prefix_directory": string,
    "kept_weights_directory": string,
    "kept_weights_gb": number,
    "kv_offloading_size": number,
    "kv_events_config": read_kv_events_config,
}
# Options of which "auto" means None.
AUTOMATIC = frozenset(
    {
        "block_size",
        "classifier_from_token",
        "default_prompt_name",
        "kv_cache_memory_bytes",
        "enable_lora",
        "max_cpu_loras",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "normalize",
        "num_gpu_blocks_override",
        "num_threads",
        "pooling",
        "quantization",
        "structured_outputs_backend",
    }
)
# vLLM's engine arguments that model.json files have, and that change no answer here.
WITHOUT_MEANING = frozenset(
    {
        "additional_config",
        "aggregate_engine_logging",
        "allowed_local_media_path",
        "async_scheduling",
        "calculate_kv_scales",
        "code_revision",
        "collect_detailed_traces",
        "compilation_config",
        "cpu_offload_gb",
        "disable_async_output_proc",
        "disable_cascade_attn",
        "disable_chunked_mm_input",
        "disable_custom_all_reduce",
        "disable_hybrid_kv_cache_manager",
        "disable_log_requests",
        "disable_log_stats",
        "disable_mm_preprocessor_cache",
        "distributed_executor_backend",
        "download_dir",
        "enable_expert_parallel",
        "enable_log_requests",
        "enable_sleep_mode",
        "generation_config",
        "guided_decoding_backend",
        "ignore_patterns",
        "kv_sharing_fast_prefill",
        "long_prefill_token_threshold",
        "max_context_len_to_capture",
        "max_log_len",
        "max_long_partial_prefills",
        "max_num_partial_prefills",
        "max_parallel_loading_workers",
        "max_seq_len_to_capture",
        "mm_processor_kwargs",
        "model_impl",
        "model_loader_extra_config",
        "num_lookahead_slots",
        "num_scheduler_steps",
        "otlp_traces_endpoint",
        "preemption_mode",
        "prefix_caching_hash_algo",
        "ray_workers_use_nsight",
        "revision",
        "served_model_name",
        "show_hidden_metrics_for_version",
        "stream_interval",
        "structured_outputs_config",
        "swap_space",
        "tokenizer_mode",
        "tokenizer_revision",
        "trust_remote_code",
        "use_tqdm_on_load",
        "use_v2_block_manager",
        "worker_use_ray",
    }
)
# Those that would change answers, or run code, and what each may be here; null is as good as absent.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "data_parallel_size": (1,),
    "disable_sliding_window": (False,),
    "enable_prompt_embeds": (False,),
    "hf_overrides": ({},),
    "io_processor_plugin": (),
    "kv_transfer_config": (),
    "load_format": ("auto", "safetensors", "gguf"),
    "logits_processors": ([],),
    "lora_dtype": ("auto",),
    "logprobs_mode": ("raw_logprobs",),
    "override_generation_config": ({},),
    "override_pooler_config": ({},),
    "pipeline_parallel_size": (1,),
    "rope_scaling": ({},),
    "rope_theta": (),
    "runner": ("auto", "generate"),
    "scheduler_cls": (),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate"),
    "worker_cls": ("auto",),
    "worker_extension_cls": ("",),
}
MIN_TOKENS = 2  # a prompt of one, an output of one
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "block_size": (lambda value: 1 <= value <= 4096, "from 1 to 4096"),
    "max_model_len": (lambda value: value >= MIN_TOKENS, f"at least {MIN_TOKENS}"),
    "max_num_seqs": (lambda value: value >= 1, "at least 1"),
    "max_num_batched_tokens": (lambda value: value >= 1, "at least 1"),
    "num_gpu_blocks_override": (lambda value: value >= 2, "at least 2 (one block is for padding)"),
    "kv_cache_memory_bytes": (lambda value: value >= 1, "at least 1"),
    "kv_cache_dtype": (lambda value: value in KV_CACHE_DTYPES, f"one of {', '.join(KV_CACHE_DTYPES)}"),
    "gpu_memory_utilization": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "scheduling_policy": (lambda value: value in ("fcfs", "priority"), "fcfs or priority"),
    "seed": (lambda value: abs(value) < 2**63, "an integer of 64 bits"),
    "tensor_parallel_size": (lambda value: value >= 1, "at least 1"),
    "distributed_timeout_seconds": (lambda value: value >= 0, "at least 0 (no limit)"),
    "max_logprobs": (lambda value: value >= 0, "at least 0"),
    "num_threads": (lambda value: value >= 1, "at least 1"),
    "limit_mm_per_prompt": (lambda value: value >= 0, "at least 0"),
    "max_image_pixels": (lambda value: value >= 1, "at least 1"),
    "mm_processor_cache_gb": (lambda value: value >= 0, "at least 0"),
    "kept_weights_gb": (lambda value: value >= 0, "at least 0 (GiB)"),
    "kv_offloading_size": (lambda value: 0 <= value <= 1 << 20, "from 0 to 1048576 (GiB)"),
    "max_loras": (lambda value: 1 <= value <= 1024, "from 1 to 1024"),
    "max_lora_rank": (lambda value: 1 <= value <= 4096, "from 1 to 4096"),
    "max_cpu_loras": (lambda value: value >= 1, "at least 1"),
    "pooling": (lambda value: pooling_of(value) is not None, f"one of {', '.join(POOLINGS)}"),
    "structured_outputs_backend": (lambda value: value in ("guidance", "xgrammar"), "auto, guidance or xgrammar"),
}
