"""The numbers of one engine, with the meaning that vLLM's metrics of the same name have (`vllm:*`)."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from modelserver.backend import Measurement

from .lora.slots import AdapterSlots
from .sequence import FinishReason

TTFT_BOUNDARIES_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDARIES_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDARIES_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_BOUNDARIES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_BOUNDARIES = (1, 2, 5, 10, 20)


def length_boundaries(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `longest` tokens."""
    return tuple(
        digit * 10**power for power in range(len(str(longest))) for digit in (1, 2, 5) if digit * 10**power <= longest
    )


class Histogram:
    """Counts of observations per bucket, as Prometheus has them: `counts[i]` are those up to `boundaries[i]`, above the
    one before; the last are those above all. One thread observes; another may read, and misses at most the latest.
    """

    __slots__ = ("boundaries", "counts", "total")

    def __init__(self, boundaries: Iterable[float]) -> None:
        self.boundaries = tuple(boundaries)
        self.counts = [0] * (len(self.boundaries) + 1)
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.boundaries, value)] += times
        self.total += value * times


class SpeculationStatistics:
    """Drafts of steps: how often there were any (`num_drafts`), how many tokens, and how many of them were right, in
    all and by their place. They only grow."""

    def __init__(self, most_drafts: int) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.accepted_by_place = [0] * most_drafts

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_by_place[place] += 1


@dataclass(slots=True, kw_only=True)
class EngineStatistics:
    """Gauges say how it is after the last step; counters and histograms only grow. Times in seconds, lengths in tokens.

    As in vLLM each choice of a request counts as a request; `request_params_n` and `request_longest_generation` (the
    most tokens that a choice has got) are observed once for all of them.
    """

    max_model_len: int
    speculation: SpeculationStatistics | None = None
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_steps: int = 0
    # Of all steps together, the sequences that they computed tokens of.
    num_step_sequences: int = 0
    # Of those that ended, prompt and output.
    longest_sequence: int = 0
    by_finish_reason: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    # Of adapters, by name: the sequences that ended, and the tokens that they generated.
    by_adapter: dict[str, tuple[int, int]] = field(default_factory=dict)
    time_to_first_token_s: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDARIES_S))
    inter_token_latency_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDARIES_S))
    time_per_output_token_s: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDARIES_S))
    e2e_latency_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDARIES_S))
    queue_time_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDARIES_S))
    inference_time_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDARIES_S))
    prefill_time_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDARIES_S))
    decode_time_s: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDARIES_S))
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(ITERATION_BOUNDARIES))
    request_params_n: Histogram = field(default_factory=lambda: Histogram(CHOICE_BOUNDARIES))
    request_prompt_tokens: Histogram = field(init=False)
    request_generation_tokens: Histogram = field(init=False)
    request_params_max_tokens: Histogram = field(init=False)
    request_longest_generation: Histogram = field(init=False)

    def __post_init__(self) -> None:
        lengths = length_boundaries(self.max_model_len)
        self.request_prompt_tokens = Histogram(lengths)
        self.request_generation_tokens = Histogram(lengths)
        self.request_params_max_tokens = Histogram(lengths)
        self.request_longest_generation = Histogram(lengths)

    def observe_adapter(self, name: str, num_tokens: int) -> None:
        """Count the end of a sequence with an adapter."""
        num_ended, total = self.by_adapter.get(name, (0, 0))
        self.by_adapter[name] = num_ended + 1, total + num_tokens

    def observe_tokens(self, since_ns: Mapping[int, int], now_ns: int) -> None:
        """Count tokens at `now_ns`: the number of sequences (values) by the time of their previous token (keys)."""
        for last_ns, times in since_ns.items():
            self.inter_token_latency_s.observe((now_ns - last_ns) / 1e9, times)


# The engine's statistics under vLLM's names, as the metrics page has them.

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
_TIME_PER_OUTPUT_TOKEN = "time_per_output_token_seconds"  # noqa: S105 - not a password


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
