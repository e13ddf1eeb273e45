"""The numbers of one engine, with the meaning that vLLM's metrics of the same name have (`vllm:*`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
