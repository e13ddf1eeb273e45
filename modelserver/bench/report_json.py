"""Results as one JSON document, for programs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from modelserver.bench.latency import Latency
from modelserver.bench.report_files import write_file
from modelserver.bench.results import LevelResult, Results
from modelserver.bench.server_statistics import ModelCounts, ServerCounts
from modelserver.bench.window import Window

_PARTS = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


def results_document(results: Results) -> dict[str, Any]:
    """Times are microseconds, as the names say."""
    options = results.options
    return {
        "tool": "modelserver bench",
        "tool_version": metadata.version("modelserver"),
        "model": results.interface.name,
        "model_version": results.interface.version,
        "url": str(options.address),
        "protocol": "grpc" if options.is_grpc else "http",
        "is_streaming": options.is_streaming,
        "mode": results.mode.value,
        "batch_size": options.request.data.batch_size,
        "num_workers": results.num_workers,
        "num_failures": results.num_failures,
        "levels": [level_document(level) for level in results.levels],
    }


def level_document(level: LevelResult) -> dict[str, Any]:
    window = level.window
    return {
        "value": level.value,
        "is_stable": level.is_stable,
        "throughput": window.throughput,
        "num_requests": window.num_requests,
        "num_responses": window.num_responses,
        "num_failures": level.num_failures,
        "num_unanswered": level.num_unanswered,
        "failures": dict(level.failures),
        "num_delayed": window.num_delayed,
        "duration_s": window.seconds,
        "latency": latency_document(window.latency),
        "client": {
            "send_us": window.send_us,
            "receive_us": window.receive_us,
            "cpu_us_per_request": window.cpu_us,
            "busiest_process": window.busiest,
        },
        "server": _server_document(window.server),
        "gpu": asdict(level.gpu),
        "windows": [_window_document(one) for one in level.windows],
    }


def latency_document(latency: Latency) -> dict[str, Any]:
    return {
        "mean_us": latency.mean_us,
        "std_us": latency.std_us,
        "min_us": latency.min_us,
        "max_us": latency.max_us,
        **{f"p{share:g}_us": value for share, value in latency.percentiles.items()},
        "histogram": {"edges_us": list(latency.edges_us), "counts": list(latency.counts)},
    }


def _window_document(window: Window) -> dict[str, Any]:
    return {
        "throughput": window.throughput,
        "mean_us": window.latency.mean_us,
        "num_requests": window.num_requests,
        "num_failed": window.num_failed,
    }


def _server_document(server: ServerCounts | None) -> dict[str, Any] | None:
    if server is None:
        return None
    return _counts_document(server.model) | {"steps": [_counts_document(step) for step in server.steps]}


def _counts_document(counts: ModelCounts) -> dict[str, Any]:
    return {
        "model": counts.name,
        "version": counts.version,
        "inference_count": counts.inference_count,
        "execution_count": counts.execution_count,
        "success_count": counts.success.count,
        "fail_count": counts.fail.count,
        "request_us": counts.mean_us("success"),
        "overhead_us": counts.overhead_us,
        **{f"{part}_us": counts.mean_us(part) for part in _PARTS},
    }


def write_document(document: dict[str, Any], target: str) -> None:
    """To a file, or to standard output for "-". Raises ServerError."""
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    write_file(Path(target), text, "--json")
