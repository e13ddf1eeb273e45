"""The engine's statistics under vLLM's names, as the metrics page has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from modelserver.backend import Measurement

from .engine_statistics import EngineStatistics, Histogram, SpeculationStatistics
from .lora.slots import AdapterSlots

_NUMBERS: tuple[tuple[str, str, str, Callable[[EngineStatistics], float]], ...] = (
    ("num_requests_running", "gauge", "Sequences that are computed step by step", lambda s: s.num_running),
    ("kv_cache_usage_perc", "gauge", "Share of the KV cache's blocks in use, 0 to 1", lambda s: s.kv_cache_usage),
    ("prompt_tokens", "counter", "Tokens of the prompts that were computed or found", lambda s: s.num_prompt_tokens),
    ("prompt_tokens_cached", "counter", "Of these, found in the prefix cache", lambda s: s.num_cached_prompt_tokens),
    ("generation_tokens", "counter", "Tokens generated", lambda s: s.num_generation_tokens),
    ("prefix_cache_queries", "counter", "Tokens looked for in the prefix cache", lambda s: s.num_prefix_query_tokens),
    ("prefix_cache_hits", "counter", "Tokens found in the prefix cache", lambda s: s.num_prefix_hit_tokens),
    (
        "num_preemptions",
        "counter",
        "Sequences that lost their blocks and were recomputed",
        lambda s: s.num_preemptions,
    ),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineStatistics], Histogram]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token", lambda s: s.time_to_first_token_s),
    ("inter_token_latency_seconds", "From each token to the next", lambda s: s.inter_token_latency_s),
    ("request_time_per_output_token_seconds", "Mean of that per sequence", lambda s: s.time_per_output_token_s),
    ("e2e_request_latency_seconds", "From arrival to the end", lambda s: s.e2e_latency_s),
    ("request_queue_time_seconds", "From arrival to the first step", lambda s: s.queue_time_s),
    ("request_inference_time_seconds", "From the first step to the end", lambda s: s.inference_time_s),
    ("request_prefill_time_seconds", "From the first step to the first token", lambda s: s.prefill_time_s),
    ("request_decode_time_seconds", "From the first token to the last", lambda s: s.decode_time_s),
    ("request_prompt_tokens", "Tokens of a prompt", lambda s: s.request_prompt_tokens),
    ("request_generation_tokens", "Tokens generated for a sequence", lambda s: s.request_generation_tokens),
    (
        "request_max_num_generation_tokens",
        "Tokens of the longest of a request's choices",
        lambda s: s.request_longest_generation,
    ),
    ("request_params_max_tokens", "Tokens that a sequence may generate", lambda s: s.request_params_max_tokens),
    ("request_params_n", "Choices that a request asks for", lambda s: s.request_params_n),
    ("iteration_tokens_total", "Tokens computed in a step", lambda s: s.iteration_tokens),
)
# Triton's vLLM backend still has this name for it.
_TIME_PER_OUTPUT_TOKEN = "time_per_output_token_seconds"  # noqa: S105  # no password


def measure(
    statistics: EngineStatistics,
    *,
    num_unread: int = 0,
    cache: Mapping[str, object] | None = None,
    adapters: AdapterSlots | None = None,
) -> list[Measurement]:
    """All of them, as they are now; may be called while a step runs.

    `num_unread` requests were taken on, and wait for the engine; `cache` describes the KV cache where there is one.
    `adapters` are the slots of a model with adapters.
    """
    found = [Measurement(f"vllm:{name}", kind, text, float(read(statistics))) for name, kind, text, read in _NUMBERS]
    text = "Requests that wait: in the model's queue, to become tokens, for their turn, or again for blocks"
    num_waiting = float(statistics.num_waiting + num_unread)
    found.insert(1, Measurement("vllm:num_requests_waiting", "gauge", text, num_waiting, adds_queue=True))
    found += [
        Measurement(
            "llm_step_sequences", "counter", "Sequences of all steps together", float(statistics.num_step_sequences)
        ),
        Measurement(
            "llm_longest_sequence_tokens",
            "gauge",
            "Prompt and output of the longest sequence that ended",
            float(statistics.longest_sequence),
        ),
    ]
    if cache is not None:
        labels = {name: str(value) for name, value in cache.items()}
        found.append(Measurement("vllm:cache_config_info", "gauge", "The KV cache; the value is always 1", 1.0, labels))
    if statistics.speculation is not None:
        found += _speculation(statistics.speculation)
    if adapters is not None:
        found += _of_adapters(statistics, adapters)
    found += [
        Measurement(
            "vllm:request_success",
            "counter",
            "Sequences that ended, by reason",
            float(count),
            {"finished_reason": reason.value},
        )
        for reason, count in statistics.by_finish_reason.items()
    ]
    found += [_histogram(name, text, read(statistics)) for name, text, read in _HISTOGRAMS]
    found.append(_histogram(_TIME_PER_OUTPUT_TOKEN, "From each token to the next", statistics.inter_token_latency_s))
    return found


def _speculation(statistics: SpeculationStatistics) -> list[Measurement]:
    numbers = (
        ("drafts", "Steps of sequences that checked drafts", statistics.num_drafts),
        ("draft_tokens", "Tokens that were drafted and checked", statistics.num_draft_tokens),
        ("accepted_tokens", "Of these, those that were right", statistics.num_accepted_tokens),
    )
    found = [
        Measurement(f"vllm:spec_decode_num_{name}", "counter", text, float(value)) for name, text, value in numbers
    ]
    text = "Drafts that were right, by their place in a step"
    return found + [
        Measurement(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "counter", text, float(count), {"position": str(place)}
        )
        for place, count in enumerate(statistics.accepted_by_place)
    ]


def _of_adapters(statistics: EngineStatistics, slots: AdapterSlots) -> list[Measurement]:
    """Which adapters sequences run with, as routers between servers read it; and the work that each has had."""
    labels = {
        "max_lora": str(slots.num_slots),
        "running_lora_adapters": ",".join(sorted(slots.running.copy())),
        "waiting_lora_adapters": ",".join(sorted(slots.waiting.copy())),
    }
    text = "Adapters that sequences run with, and wait for; the value is the time"
    found = [Measurement("vllm:lora_requests_info", "gauge", text, time.time(), labels)]
    for name, (num_requests, num_tokens) in sorted(statistics.by_adapter.copy().items()):
        label = {"lora_name": name}
        found += [
            Measurement("llm_adapter_requests", "counter", "Sequences that ended, by adapter", num_requests, label),
            Measurement("llm_adapter_generation_tokens", "counter", "Tokens generated, by adapter", num_tokens, label),
        ]
    return found


def _histogram(name: str, text: str, histogram: Histogram) -> Measurement:
    return Measurement(
        f"vllm:{name}", "histogram", text, histogram.total, bounds=histogram.boundaries, counts=tuple(histogram.counts)
    )
