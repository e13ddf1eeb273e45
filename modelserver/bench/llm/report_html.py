"""The HTML report of prompts."""

from __future__ import annotations

import time
from collections.abc import Callable

from modelserver.bench import charts, page
from modelserver.bench.charts import Point, Series
from modelserver.bench.llm.figures import LlmFigures, Spread
from modelserver.bench.llm.report_text import cells, rows_of
from modelserver.bench.llm.results import LlmResults
from modelserver.bench.report_text import level_name

_COLUMNS = ("", "avg", "min", "max", "p99", "p95", "p90", "p75", "p50", "std")


def html_llm_report(results: LlmResults) -> str:
    """The whole page."""
    options = results.options
    subtitle = (
        f"{options.endpoint_type.value} at {options.address}, {results.num_workers} load processes, "
        f"{time.strftime('%Y-%m-%d %H:%M')}"
    )
    sections = [_overview(results), _curves(results), *_tables(results)]
    if results.num_failures:
        rows = [
            (level_name(options.load.mode, level.value), str(count), text)
            for level in results.levels
            for text, count in level.failures.most_common(10)
        ]
        sections.insert(
            0,
            page.section(
                "Failures",
                page.warning(f"{results.num_failures} requests failed; the figures are of the others only."),
                page.table(("load", "count", "what"), rows),
            ),
        )
    return page.page(f"Benchmark of {options.model}", subtitle, sections)


def _overview(results: LlmResults) -> str:
    best = max(results.levels, key=lambda level: level.figures.output_rate)
    name = level_name(results.options.load.mode, best.value)
    entries = [
        (f"output tokens/s at best, {name}", charts.short(best.figures.output_rate)),
        ("time to first token there, p50 (ms)", charts.short(best.figures.ttft.percentiles[50])),
        ("time per output token there, p50 (ms)", charts.short(best.figures.per_token.percentiles[50])),
    ]
    if best.figures.goodput is not None:
        top = max(level.figures.goodput or 0.0 for level in results.levels)
        entries.append(("best goodput (requests/s)", charts.short(top)))
    return page.section("At a glance", page.facts(entries))


def _curves(results: LlmResults) -> str:
    levels = sorted(results.levels, key=lambda level: level.value)
    mode = results.options.load.mode

    def line(name: str, color: int, value: Callable[[LlmFigures], float]) -> Series:
        points = [
            Point(
                level.figures.output_rate,
                value(level.figures),
                f"{level_name(mode, level.value)}: {name} {charts.short(value(level.figures))}",
                f"{level.value:g}" if color == 1 else "",
            )
            for level in levels
        ]
        return Series(name, color, points)

    def chart(title: str, spread: Callable[[LlmFigures], Spread], unit: str) -> tuple[str, str]:
        series = [
            line("p99", 1, lambda figures: spread(figures).percentiles[99]),
            line("p50", 0, lambda figures: spread(figures).percentiles[50]),
        ]
        return title, charts.line_chart(series, title=title, x_name="output tokens/s", y_name=unit)

    return page.section(
        "Against output throughput",
        page.pair(
            chart("Time to first token", lambda figures: figures.ttft, "ms"),
            chart("Time per output token", lambda figures: figures.per_token, "ms"),
            chart("Request latency", lambda figures: figures.latency, "ms"),
            chart("Speed per user", lambda figures: figures.per_user, "tokens/s"),
        ),
    )


def _tables(results: LlmResults) -> list[str]:
    sections = []
    for level in results.levels:
        figures = level.figures
        rows = [[name, *(f"{value:,.2f}" for value in cells(one))] for name, one in rows_of(figures) if one.count]
        entries = [
            ("requests", str(figures.num_requests)),
            ("requests/s", charts.short(figures.request_rate)),
            ("output tokens/s", charts.short(figures.output_rate)),
        ]
        if figures.goodput is not None:
            entries.append(("goodput (requests/s)", charts.short(figures.goodput)))
        name = level_name(results.options.load.mode, level.value)
        sections.append(page.section(name[:1].upper() + name[1:], page.facts(entries), page.table(_COLUMNS, rows)))
    return sections
