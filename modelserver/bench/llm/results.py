"""The results of a run of prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from modelserver.bench.llm.options import LlmOptions, Target
from modelserver.bench.window import percentile


class Call(msgspec.Struct, array_like=True, frozen=True):
    """One answered request. Times are of the monotonic clock, ns; `chunk_times` are of events that brought text.

    Token counts are those of the server's `usage`, None where it sent none.
    """

    due_ns: int
    start_ns: int
    end_ns: int
    step: int
    chunk_times: list[int]
    input_tokens: int | None
    output_tokens: int | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Call])


def pack_calls(calls: list[Call]) -> bytes:
    return _encoder.encode(calls)


def unpack_calls(packed: bytes) -> list[Call]:
    return _decoder.decode(packed)


# Figures from the times of streamed tokens: time to first token, time between tokens, throughput, goodput. Pure.
# Tokens are those of the server's `usage`; a server that sends none is counted by events with text.
SHARES = (50, 75, 90, 95, 99)
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Spread:
    """How a figure varies over the requests."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    percentiles: dict[int, float]


def spread(values: Sequence[float]) -> Spread:
    if not len(values):
        return Spread(0, 0.0, 0.0, 0.0, 0.0, dict.fromkeys(SHARES, 0.0))
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    return Spread(
        len(ordered),
        float(ordered.mean()),
        float(ordered.std()),
        float(ordered[0]),
        float(ordered[-1]),
        {share: percentile(ordered, share) for share in SHARES},
    )


@dataclass(frozen=True, slots=True)
class CallFigures:
    """One request, in milliseconds. Figures that need two tokens are None for an answer of one."""

    ttft_ms: float
    second_ms: float | None
    latency_ms: float
    # Between the first and the last token: the mean.
    per_token_ms: float | None
    output_tokens: int
    input_tokens: int | None

    def meets(self, targets: Mapping[Target, float]) -> bool:
        """Whether the request is a good one."""
        found = {Target.TTFT: self.ttft_ms, Target.ITL: self.per_token_ms, Target.LATENCY: self.latency_ms}
        return all((found[target] or 0.0) <= limit for target, limit in targets.items())


def call_figures(call: Call) -> CallFigures:
    """The figures of one call; a call has at least one chunk."""
    first, last = call.chunk_times[0], call.chunk_times[-1]
    num_tokens = call.output_tokens if call.output_tokens is not None else len(call.chunk_times)
    has_two = num_tokens > 1 and len(call.chunk_times) > 1
    return CallFigures(
        ttft_ms=(first - call.due_ns) / NS_PER_MS,
        second_ms=(call.chunk_times[1] - first) / NS_PER_MS if len(call.chunk_times) > 1 else None,
        latency_ms=(last - call.due_ns) / NS_PER_MS,
        per_token_ms=(last - first) / (num_tokens - 1) / NS_PER_MS if has_two else None,
        output_tokens=num_tokens,
        input_tokens=call.input_tokens,
    )


@dataclass(frozen=True, slots=True)
class LlmFigures:
    """A level of load. Times are milliseconds, rates per second."""

    num_requests: int
    seconds: float
    ttft: Spread
    second: Spread
    # Every gap between two events with text.
    gaps: Spread
    per_token: Spread
    latency: Spread
    per_user: Spread
    output_tokens: Spread
    input_tokens: Spread
    request_rate: float
    output_rate: float
    total_rate: float
    # Requests per second that met all targets, and their share; None without targets.
    goodput: float | None
    good_share: float | None
    # Whether the server counted the tokens.
    has_usage: bool


def level_figures(calls: Sequence[Call], *, targets: Mapping[Target, float]) -> LlmFigures:
    """From the first request's start to the last one's end."""
    figures = [call_figures(call) for call in calls]
    seconds = (max(call.end_ns for call in calls) - min(call.start_ns for call in calls)) / 1e9 if calls else 0.0
    gaps = [gap / NS_PER_MS for call in calls for gap in np.diff(call.chunk_times).tolist()]
    per_token = [figure.per_token_ms for figure in figures if figure.per_token_ms is not None]
    inputs = [figure.input_tokens for figure in figures if figure.input_tokens is not None]
    num_output = sum(figure.output_tokens for figure in figures)
    num_good = sum(figure.meets(targets) for figure in figures)

    def rate(count: float) -> float:
        return count / seconds if seconds > 0 else 0.0

    return LlmFigures(
        num_requests=len(calls),
        seconds=seconds,
        ttft=spread([figure.ttft_ms for figure in figures]),
        second=spread([figure.second_ms for figure in figures if figure.second_ms is not None]),
        gaps=spread(gaps),
        per_token=spread(per_token),
        latency=spread([figure.latency_ms for figure in figures]),
        per_user=spread([1000.0 / value for value in per_token if value > 0]),
        output_tokens=spread([figure.output_tokens for figure in figures]),
        input_tokens=spread(inputs),
        request_rate=rate(len(calls)),
        output_rate=rate(num_output),
        total_rate=rate(num_output + sum(inputs)),
        goodput=rate(num_good) if targets else None,
        good_share=num_good / len(calls) if targets and calls else None,
        has_usage=any(call.output_tokens is not None for call in calls),
    )


@dataclass(slots=True)
class LlmLevel:
    """One level of load."""

    value: float
    figures: LlmFigures
    failures: Counter[str]
    num_unanswered: int
    busiest: float
    calls: list[Call] = field(default_factory=list)

    @property
    def num_failures(self) -> int:
        return self.failures.total() + self.num_unanswered


@dataclass(slots=True)
class LlmResults:
    """A whole run."""

    options: LlmOptions
    num_workers: int
    levels: list[LlmLevel] = field(default_factory=list)

    @property
    def num_failures(self) -> int:
        return sum(level.num_failures for level in self.levels)

    @property
    def is_good(self) -> bool:
        return bool(self.levels) and not self.num_failures and all(level.figures.num_requests for level in self.levels)
