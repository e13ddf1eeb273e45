"""The report of a run of prompts: a table per level, and the summary lines below it."""

from __future__ import annotations

from typing import TextIO

from modelserver.bench.llm.figures import LlmFigures, Spread
from modelserver.bench.llm.options import LlmOptions
from modelserver.bench.llm.results import LlmLevel, LlmResults
from modelserver.bench.progress import ProgressBar
from modelserver.bench.report_text import MAX_FAILURES_SHOWN, level_name, level_title
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


class LlmTextReport:
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
