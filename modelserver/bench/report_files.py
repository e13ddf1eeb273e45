"""The files of reports: checked before the measurement, since a run may take an hour."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from modelserver.bench.fleet import Harvest
from modelserver.bench.options import Mode, ReportOptions
from modelserver.bench.results import LevelResult, Results
from modelserver.bench.server_statistics import ModelCounts, ServerCounts
from modelserver.bench.window import END, START, Latency, Window
from modelserver.errors import InvalidArgumentError, ServerError


def check_file(path: Path, flag: str) -> None:
    """Raises InvalidArgumentError that names the flag when the file could not be written."""
    if path.is_dir():
        raise InvalidArgumentError(f"{flag}: '{path}' is a directory; name a file")
    if not path.exists() and not path.parent.is_dir():
        raise InvalidArgumentError(f"{flag}: there is no directory '{path.parent}' to write '{path.name}' into")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidArgumentError(f"{flag}: cannot write '{path}': permission denied")


def write_file(path: Path, text: str, flag: str) -> None:
    """Raises ServerError that names the flag, for what has changed since it was checked."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ServerError(f"{flag}: cannot write '{path}': {error.strerror}") from None


# The CSV report, with perf_analyzer's columns: spreadsheets and scripts are written for them.
_COLUMNS = (
    "Inferences/Second",
    "Client Send",
    "Network+Server Send/Recv",
    "Server Queue",
    "Server Compute Input",
    "Server Compute Infer",
    "Server Compute Output",
)
_CACHE_COLUMNS = ("Server Cache Hit", "Server Cache Miss")
_VERBOSE_COLUMNS = ("request/response", "response wait")
_GPU_COLUMNS = ("Avg GPU Utilization", "Avg GPU Power Usage", "Max GPU Memory Usage", "Total GPU Memory")


def csv_columns(results: Results) -> list[str]:
    """The header line of this run."""
    options = results.options
    concurrency = results.mode in (Mode.CONCURRENCY, Mode.PERIODIC)
    columns = ["Concurrency" if concurrency else "Request Rate", *_COLUMNS]
    if results.interface.has_cache:
        columns += _CACHE_COLUMNS
    columns.append("Client Recv")
    columns += [f"p{share:g} latency" for share in _shares(results)]
    if options.report.is_csv_verbose:
        if options.measurement.stability.percentile is None:
            columns.append("Avg latency")
        columns += _VERBOSE_COLUMNS
        if results.interface.is_decoupled:
            columns.append("Response Throughput")
        if options.metrics.is_collected:
            columns += _GPU_COLUMNS
    return columns


def _shares(results: Results) -> list[float]:
    return sorted({share for level in results.levels for share in level.window.latency.percentiles}) or [50, 90, 95, 99]


def csv_row(results: Results, level: LevelResult) -> list[str]:
    """One level. Times are whole microseconds."""
    window, options = level.window, results.options
    server = window.server.model if window.server is not None else None

    def part(name: str) -> int:
        return server.mean_us(name) if server is not None else 0

    parts = [part(name) for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    cache = [part("cache_hit"), part("cache_miss")] if results.interface.has_cache else []
    send, receive = int(window.send_us), int(window.receive_us)
    # The rest of the client's average is the network, and the server outside of the model.
    rest = max(0, int(window.latency.mean_us) - sum(parts) - sum(cache) - send - receive)
    row = [f"{level.value:g}", f"{window.throughput:.6g}", send, rest, *parts, *cache, receive]
    row += [int(window.latency.percentiles[share]) for share in _shares(results)]
    if options.report.is_csv_verbose:
        if options.measurement.stability.percentile is None:
            row.append(int(window.latency.mean_us))
        own = send + receive
        row += [own, max(0, int(window.latency.mean_us) - own)]
        if results.interface.is_decoupled:
            row.append(f"{window.response_rate:.6g}")
        if options.metrics.is_collected:
            gpu = level.gpu
            row += [_by_gpu(gpu.utilization), _by_gpu(gpu.power_watts)]
            row += [_by_gpu(gpu.max_memory_bytes), _by_gpu(gpu.total_memory_bytes)]
    return [str(cell) for cell in row]


def _by_gpu(values: Mapping[str, float]) -> str:
    return "".join(f"{name}:{value:.6g};" for name, value in values.items())


def write_csv(results: Results, path: Path) -> None:
    """Levels by increasing throughput, as perf_analyzer sorts them. Raises ServerError."""
    levels = sorted(results.levels, key=lambda level: level.window.throughput)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(csv_columns(results))
    writer.writerows(csv_row(results, level) for level in levels)
    write_file(path, text.getvalue(), "-f")


# Results as one JSON document, for programs.
_PARTS = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")


def results_document(results: Results) -> dict[str, Any]:
    """Times are microseconds, as the names say."""
    options = results.options
    return {
        "tool": "modelserver bench",
        "tool_version": metadata.version("modelserver-py"),
        "model": results.interface.name,
        "model_version": results.interface.version,
        "url": str(options.address),
        "protocol": "grpc" if options.is_grpc else "http",
        "is_streaming": options.is_streaming,
        "mode": results.mode.value,
        "batch_size": options.request.data.batch_size,
        "num_workers": results.num_workers,
        "num_failures": results.num_failures,
        "levels": [_priced(level, results.options.report) for level in results.levels],
    }


def _priced(level: LevelResult, report: ReportOptions) -> dict[str, Any]:
    price = report.price_per_million(level.window.throughput)
    return {**level_document(level), "cost_per_million_inferences": price}


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


def export_document(results: Results, wall_offset_ns: int) -> dict[str, Any]:
    """The document; `wall_offset_ns` converts the monotonic clock to the time since 1970."""
    return {
        "experiments": [_experiment(results, level, wall_offset_ns) for level in results.levels],
        "version": metadata.version("modelserver-py"),
        "service_kind": "triton",
        "endpoint": "",
    }


def _experiment(results: Results, level: LevelResult, offset_ns: int) -> dict[str, Any]:
    mode = "concurrency" if results.mode in (Mode.CONCURRENCY, Mode.PERIODIC) else "request_rate"
    boundaries = [window.begin_ns + offset_ns for window in level.windows]
    boundaries.append(level.windows[-1].end_ns + offset_ns)
    value: float = int(level.value) if level.value == int(level.value) else level.value
    return {
        "experiment": {"mode": mode, "value": value},
        "requests": _requests(level.harvest, offset_ns) if level.harvest is not None else [],
        "window_boundaries": boundaries,
    }


def _requests(harvest: Harvest, offset_ns: int) -> list[dict[str, Any]]:
    starts = (harvest.times[:, START] + offset_ns).tolist()
    if len(harvest.num_responses) == len(starts):
        cuts = np.cumsum(harvest.num_responses)[:-1]
        pieces = np.split(harvest.response_times + offset_ns, cuts) if starts else []
        responses = [piece.tolist() for piece in pieces]
    else:
        responses = [[end] for end in (harvest.times[:, END] + offset_ns).tolist()]
    return [{"timestamp": start, "response_timestamps": times} for start, times in zip(starts, responses, strict=True)]


def write_export(results: Results, path: Path) -> None:
    """Raises ServerError."""
    document = export_document(results, time.time_ns() - time.monotonic_ns())
    write_file(path, json.dumps(document, separators=(",", ":")), "--profile-export-file")
