"""Results of prompts as one JSON document."""

from __future__ import annotations

from dataclasses import asdict
from importlib import metadata
from typing import Any

from modelserver.bench.llm.figures import Spread
from modelserver.bench.llm.results import LlmLevel, LlmResults


def llm_document(results: LlmResults) -> dict[str, Any]:
    """Times are milliseconds, as the names say."""
    options = results.options
    return {
        "tool": "modelserver bench --llm",
        "tool_version": metadata.version("modelserver"),
        "model": options.model,
        "url": str(options.address),
        "endpoint_type": options.endpoint_type.value,
        "mode": options.load.mode.value,
        "num_workers": results.num_workers,
        "goodput_targets_ms": {target.value: limit for target, limit in options.goodput.items()},
        "num_failures": results.num_failures,
        "levels": [_level_document(level) for level in results.levels],
    }


def _level_document(level: LlmLevel) -> dict[str, Any]:
    figures = level.figures
    return {
        "value": level.value,
        "num_requests": figures.num_requests,
        "duration_s": figures.seconds,
        "request_throughput": figures.request_rate,
        "output_token_throughput": figures.output_rate,
        "total_token_throughput": figures.total_rate,
        "goodput": figures.goodput,
        "goodput_share": figures.good_share,
        "has_usage": figures.has_usage,
        "time_to_first_token_ms": _spread(figures.ttft),
        "time_to_second_token_ms": _spread(figures.second),
        "inter_token_latency_ms": _spread(figures.gaps),
        "time_per_output_token_ms": _spread(figures.per_token),
        "request_latency_ms": _spread(figures.latency),
        "output_token_throughput_per_user": _spread(figures.per_user),
        "output_sequence_length": _spread(figures.output_tokens),
        "input_sequence_length": _spread(figures.input_tokens),
        "num_failures": level.num_failures,
        "failures": dict(level.failures),
    }


def _spread(one: Spread) -> dict[str, float]:
    document: dict[str, Any] = asdict(one)
    percentiles = document.pop("percentiles")
    return document | {f"p{share}": value for share, value in percentiles.items()}
