"""The reports of a run of prompts: text with a table per level, JSON, and an HTML page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any, TextIO

from modelserver.bench import charts, page
from modelserver.bench.charts import Point, Series
from modelserver.bench.llm.options import LlmOptions
from modelserver.bench.llm.results import LlmFigures, LlmLevel, LlmResults, Spread
from modelserver.bench.llm.session import LlmWatcher
from modelserver.bench.options import ReportOptions
from modelserver.bench.report_text import MAX_FAILURES_SHOWN, ProgressBar, level_name, level_title
from modelserver.bench.results import MAX_BUSY

_COLUMNS = ("avg", "min", "max", "p99", "p95", "p90", "p75", "p50", "std")
_NAME_WIDTH, _WIDTH = 36, 10


def rows_of(figures: LlmFigures) -> list[tuple[str, Spread]]:
    """The rows of the table, with what each spreads over."""
    return [
        ("Time to first token (ms)", figures.ttft),
        ("Time to second token (ms)", figures.second),
        ("Inter token latency (ms)", figures.gaps),
        ("Time per output token (ms)", figures.per_token),
        ("Request latency (ms)", figures.latency),
        ("Output tokens/s per user", figures.per_user),
        ("Output sequence length (tokens)", figures.output_tokens),
        ("Input sequence length (tokens)", figures.input_tokens),
    ]


def cells(one: Spread) -> tuple[float, ...]:
    at = one.percentiles
    return (one.mean, one.min, one.max, at[99], at[95], at[90], at[75], at[50], one.std)


def level_lines(level: LlmLevel, options: LlmOptions) -> list[str]:
    figures = level.figures
    lines = [f"{'':<{_NAME_WIDTH}}" + "".join(f"{name:>{_WIDTH}}" for name in _COLUMNS)]
    for name, one in rows_of(figures):
        if one.count:
            lines.append(f"{name:<{_NAME_WIDTH}}" + "".join(f"{value:>{_WIDTH},.2f}" for value in cells(one)))
    lines.append("")
    lines.append(f"Request count: {figures.num_requests} in {figures.seconds:.2f} s")
    lines.append(f"Request throughput (per sec): {figures.request_rate:.2f}")
    lines.append(f"Output token throughput (per sec): {figures.output_rate:.2f}")
    if figures.input_tokens.count:
        lines.append(f"Total token throughput (per sec): {figures.total_rate:.2f}")
    lines += options.report.price_line("requests", figures.request_rate)
    lines += options.report.price_line("output tokens", figures.output_rate)
    if figures.input_tokens.count:
        lines += options.report.price_line("tokens", figures.total_rate)
    if figures.goodput is not None:
        targets = " ".join(f"{target.value}:{limit:g}" for target, limit in options.goodput.items())
        lines.append(f"Goodput (per sec): {figures.goodput:.2f}, {figures.good_share or 0:.1%} of requests ({targets})")
    if not figures.has_usage and figures.num_requests:
        lines.append("Tokens are counted by events: the server sends no usage.")
    if level.num_failures:
        lines.append(f"FAILED request count: {level.num_failures}")
    if level.busiest > MAX_BUSY:
        lines.append(f"WARNING: a load process used {level.busiest:.0%} of its CPU; raise --max-threads.")
    return lines


class LlmTextReport(LlmWatcher):
    """Writes as the run goes on."""

    def __init__(self, options: LlmOptions, out: TextIO, bar: ProgressBar) -> None:
        self._options = options
        self._out = out
        self._bar = bar
        self._has_begun = False
        self._name = ""

    def line(self, text: str = "") -> None:
        self._bar.clear()
        self._out.write(text + "\n")
        self._out.flush()

    def _begin(self) -> None:
        """Written before the first level: a run that cannot start reports only its error."""
        if self._has_begun:
            return
        self._has_begun = True
        options = self._options
        self.line(f"{options.model} at {options.address}, {options.endpoint_type.value}")
        for note in options.notes:
            self.line(f"NOTE: {note}.")
        self.line()

    def level_began(self, value: float) -> None:
        self._begin()
        self._name = level_name(self._options.load.mode, value)
        self.line(level_title(self._options.load.mode, value))

    def progressed(self, num_done: int, num_requests: int) -> None:
        self._bar.count(self._name, num_done, num_requests)

    def level_ended(self, level: LlmLevel) -> None:
        for line in level_lines(level, self._options):
            self.line(line)
        self.line()

    def end(self, results: LlmResults) -> None:
        self._bar.close()
        for line in failure_lines(results):
            self.line(line)


def failure_lines(results: LlmResults) -> list[str]:
    if not results.num_failures:
        return []
    lines = [f"!!! {results.num_failures} REQUESTS FAILED: the figures above are of the others only !!!"]
    for level in results.levels:
        for text, count in level.failures.most_common(MAX_FAILURES_SHOWN):
            lines.append(f"  {level_name(results.options.load.mode, level.value)}: {count} x {text}")
        if level.num_unanswered:
            lines.append(
                f"  {level_name(results.options.load.mode, level.value)}: {level.num_unanswered} x never answered"
            )
    return lines


def llm_document(results: LlmResults) -> dict[str, Any]:
    """Times are milliseconds, as the names say."""
    options = results.options
    return {
        "tool": "modelserver bench --llm",
        "tool_version": metadata.version("modelserver-py"),
        "model": options.model,
        "url": str(options.address),
        "endpoint_type": options.endpoint_type.value,
        "mode": options.load.mode.value,
        "num_workers": results.num_workers,
        "goodput_targets_ms": {target.value: limit for target, limit in options.goodput.items()},
        "num_failures": results.num_failures,
        "levels": [_level_document(level, options.report) for level in results.levels],
    }


def _level_document(level: LlmLevel, report: ReportOptions) -> dict[str, Any]:
    figures = level.figures
    return {
        "value": level.value,
        "num_requests": figures.num_requests,
        "duration_s": figures.seconds,
        "request_throughput": figures.request_rate,
        "output_token_throughput": figures.output_rate,
        "total_token_throughput": figures.total_rate,
        "cost_per_million_requests": report.price_per_million(figures.request_rate),
        "cost_per_million_output_tokens": report.price_per_million(figures.output_rate),
        "cost_per_million_tokens": report.price_per_million(figures.total_rate),
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
        sections.append(
            page.section(name[:1].upper() + name[1:], page.facts(entries), page.table(("", *_COLUMNS), rows))
        )
    return sections
