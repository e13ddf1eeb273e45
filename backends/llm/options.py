"""The options of one engine, named as vLLM names them: `parameters` of config.pbtxt, or keys of `model.json`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """None of an option: the engine decides, by the model and the device.

    `max_num_batched_tokens` bounds a step, `max_num_seqs` what runs at once, `max_model_len` prompt and output
    together (tokens). `kv_cache_memory_bytes` bounds the pool of blocks where `num_gpu_blocks_override` does not say
    how many there are. `scheduling_policy` is "fcfs" or "priority" (lower goes first).
    """

    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    scheduling_policy: str = "fcfs"
    dtype: str = "auto"
    quantization: str | None = None
    seed: int = 0
    device: str = "auto"
    attention_backend: str = "auto"
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    max_logprobs: int = 20
    num_threads: int | None = None
