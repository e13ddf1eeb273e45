"""The HTML report of inference requests: curves, tables, histograms, breakdown of the server's time."""

from __future__ import annotations

import time

from modelserver.bench import charts, page
from modelserver.bench.charts import Part, Point, Series
from modelserver.bench.options import Mode
from modelserver.bench.report_text import level_name
from modelserver.bench.results import LevelResult, Results

MAX_HISTOGRAMS = 12


def html_report(results: Results) -> str:
    """The whole page."""
    options = results.options
    protocol = "gRPC stream" if options.is_streaming else "gRPC" if options.is_grpc else "HTTP"
    subtitle = (
        f"{protocol} at {options.address}, batch {options.request.data.batch_size}, {results.num_workers} load "
        f"processes, {time.strftime('%Y-%m-%d %H:%M')}"
    )
    sections = [_overview(results), _curves(results), _levels(results), _server(results), _histograms(results)]
    if results.num_failures:
        sections.insert(0, _failures(results))
    return page.page(f"Benchmark of {results.interface.name}", subtitle, [part for part in sections if part])


def _name(results: Results, level: LevelResult) -> str:
    return level_name(results.mode, level.value)


def _failures(results: Results) -> str:
    rows = [
        (_name(results, level), str(count), text)
        for level in results.levels
        for text, count in level.failures.most_common(10)
    ]
    return page.section(
        "Failures",
        page.warning(f"{results.num_failures} requests failed; the figures are of the others only."),
        page.table(("load", "count", "what"), rows),
    )


def _overview(results: Results) -> str:
    best = max(results.levels, key=lambda level: level.window.throughput)
    lowest = min(results.levels, key=lambda level: level.window.latency.percentiles[50])
    return page.section(
        "At a glance",
        page.facts(
            [
                (f"inferences/s at best, {_name(results, best)}", charts.short(best.window.throughput)),
                ("p99 there (us)", charts.short(best.window.latency.percentiles[99])),
                (f"p50 at {_name(results, lowest)} (us)", charts.short(lowest.window.latency.percentiles[50])),
                ("requests measured", charts.short(sum(level.window.num_requests for level in results.levels))),
            ]
        ),
    )


def _curves(results: Results) -> str:
    levels = sorted(results.levels, key=lambda level: level.value)

    def curve(name: str, color: int, share: int, *, has_marks: bool) -> Series:
        points = [
            Point(
                level.window.throughput,
                level.window.latency.percentiles[share],
                f"{_name(results, level)}: {charts.short(level.window.throughput)}/s, {name} "
                f"{charts.short(level.window.latency.percentiles[share])} us",
                f"{level.value:g}" if has_marks else "",
            )
            for level in levels
        ]
        return Series(name, color, points)

    x_name = "concurrency" if results.mode is Mode.CONCURRENCY else "requests/s asked for"
    by_load = [
        Point(
            level.value, level.window.throughput, f"{_name(results, level)}: {charts.short(level.window.throughput)}/s"
        )
        for level in levels
    ]
    curves = [
        curve("p99", 1, 99, has_marks=True),
        curve("p90", 3, 90, has_marks=False),
        curve("p50", 0, 50, has_marks=False),
    ]
    return page.section(
        "Latency and throughput",
        page.pair(
            (
                "Latency against throughput",
                charts.line_chart(curves, title="Latency", x_name="inferences/s", y_name="latency (us)"),
            ),
            (
                "Throughput against load",
                charts.line_chart(
                    [Series("inferences/s", 2, by_load)], title="Throughput", x_name=x_name, y_name="inferences/s"
                ),
            ),
        ),
    )


def _levels(results: Results) -> str:
    shares = sorted(results.levels[0].window.latency.percentiles)
    columns = ["load", "inferences/s", "requests", "failed", "mean (us)", *(f"p{share:g}" for share in shares)]
    columns += ["std", "max", "client CPU (us)", "stable"]
    rows = []
    for level in results.levels:
        latency = level.window.latency
        rows.append(
            [
                _name(results, level),
                f"{level.window.throughput:,.1f}",
                f"{level.window.num_requests:,}",
                str(level.num_failures),
                f"{latency.mean_us:,.0f}",
                *(f"{latency.percentiles[share]:,.0f}" for share in shares),
                f"{latency.std_us:,.0f}",
                f"{latency.max_us:,.0f}",
                f"{level.window.cpu_us:.1f}",
                "yes" if level.is_stable else "no",
            ]
        )
    return page.section("All levels", page.table(columns, rows))


def _server(results: Results) -> str:
    """Where the average request spent its time; nothing for a server without statistics."""
    bars, rows = [], []
    for level in results.levels:
        server = level.window.server
        if server is None:
            continue
        model = server.model
        parts = [
            Part("queue", 1, model.mean_us("queue")),
            Part("compute input", 3, model.mean_us("compute_input")),
            Part("compute infer", 0, model.mean_us("compute_infer")),
            Part("compute output", 2, model.mean_us("compute_output")),
        ]
        rest = max(0.0, level.window.latency.mean_us - sum(part.value for part in parts))
        bars.append((_name(results, level), [*parts, Part("network, protocol, client", 5, rest)]))
        per_batch = model.inference_count / model.execution_count if model.execution_count else 0.0
        rows.append(
            [
                _name(results, level),
                f"{model.inference_count:,}",
                f"{model.execution_count:,}",
                f"{per_batch:.1f}",
                *(f"{part.value:,.0f}" for part in parts),
                f"{model.overhead_us:,}",
                f"{rest:,.0f}",
            ]
        )
    if not bars:
        return ""
    columns = ("load", "inferences", "executions", "per batch", "queue", "input", "infer", "output", "overhead", "rest")
    return page.section(
        "Where the time goes",
        charts.stacked_bars(bars, title="Server breakdown", unit="us"),
        page.table(columns, rows),
        '<p class="note">Microseconds of the average request, from the statistics of the server.</p>',
    )


def _histograms(results: Results) -> str:
    items = []
    for level in results.levels[:MAX_HISTOGRAMS]:
        latency = level.window.latency
        marks = [(f"p{share}", latency.percentiles[share]) for share in (50, 99)]
        chart = charts.histogram(latency.edges_us, latency.counts, marks, title=f"Latency, {_name(results, level)}")
        items.append((_name(results, level), chart))
    return page.section("Latency of each level", page.pair(*items))
