"""The CSV report, with perf_analyzer's columns: spreadsheets and scripts are written for them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from modelserver.bench.options import Mode
from modelserver.bench.report_files import write_file
from modelserver.bench.results import LevelResult, Results

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
