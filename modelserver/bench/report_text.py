"""The report that people read and scripts cut up: the lines of perf_analyzer, our own warnings, and a bar meanwhile."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TextIO

from modelserver.bench.options import BenchOptions, Mode, SharedMemory
from modelserver.bench.results import LevelResult, Results
from modelserver.bench.server_statistics import ModelCounts
from modelserver.bench.window import Window

WIDTH = 30
TICK_S = 0.2
_ERASE = "\r\x1b[K"
_FULL, _EMPTY = "━", "─"


class ProgressBar:
    """One line at the bottom, drawn by a task of its own while a window is measured."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_shown = out.isatty()
        self._name = ""
        self._trial = 0
        self._seconds = 0.0
        self._began_s = 0.0
        self._has_line = False
        self._task: asyncio.Task[None] | None = None

    def level_began(self, name: str) -> None:
        self._name = name

    def window_began(self, trial: int, seconds: float) -> None:
        """`seconds` is how long the window will be; 0 if unknown."""
        if not self._is_shown:
            return
        self._trial, self._seconds, self._began_s = trial, seconds, monotonic()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def count(self, name: str, num_done: int, num_all: int) -> None:
        """Draw how many of a known number are done; called again and again."""
        if self._is_shown:
            self._out.write(_ERASE + count_text(name, num_done, num_all))
            self._out.flush()
            self._has_line = True

    def window_ended(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Erase the line, so that another can be written."""
        if self._has_line:
            self._out.write(_ERASE)
            self._out.flush()
            self._has_line = False

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self.clear()

    async def _run(self) -> None:
        while True:
            self._out.write(_ERASE + bar_text(self._name, self._trial, monotonic() - self._began_s, self._seconds))
            self._out.flush()
            self._has_line = True
            await asyncio.sleep(TICK_S)


def bar_text(name: str, trial: int, passed_s: float, seconds: float) -> str:
    """The line: what is measured, and how far it is."""
    if seconds <= 0:
        return f"  {name}, {passed_s:.0f} s"
    return f"  {name}, window {trial}  {_drawn(passed_s / seconds)}"


def count_text(name: str, num_done: int, num_all: int) -> str:
    """The line of a run whose requests are counted."""
    return f"  {name}, {num_done} of {num_all}  {_drawn(num_done / max(num_all, 1))}"


def _drawn(share: float) -> str:
    share = min(1.0, share)
    full = round(share * WIDTH)
    return f"{_FULL * full}{_EMPTY * (WIDTH - full)} {share:4.0%}"


MAX_FAILURES_SHOWN = 5


def settings_lines(options: BenchOptions) -> list[str]:
    """The settings of the measurement."""
    measurement, load = options.measurement, options.load
    lines = [
        "*** Measurement Settings ***",
        f"  Batch size: {options.request.data.batch_size}",
        "  Service Kind: Triton",
    ]
    if measurement.num_requests:
        lines.append(f"  Sending a total of {measurement.num_requests} requests")
    elif measurement.counts_requests:
        lines.append('  Using "count_windows" mode for stabilization')
        lines.append(f"  Minimum number of samples in each window: {measurement.window_requests}")
    else:
        lines.append('  Using "time_windows" mode for stabilization')
        lines.append(f"  Measurement window: {measurement.interval_s * 1000:.0f} msec")
    limit = measurement.stability.latency_limit_us
    if limit:
        lines.append(f"  Latency limit: {limit / 1000:.0f} msec")
    if load.levels.end:
        unit = "concurrent requests" if load.mode is Mode.CONCURRENCY else "requests per seconds"
        noun = "Request Rate" if load.mode is Mode.REQUEST_RATE else "Concurrency"
        lines.append(f"  {noun} limit: {load.levels.end:g} {unit}")
    if load.mode is Mode.REQUEST_RATE:
        kind = "poisson" if load.is_poisson else "uniform"
        lines.append(f"  Using {kind} distribution on request generation")
    if load.is_binary:
        lines.append("  Using Binary Search algorithm")
    if options.request.shared_memory is not SharedMemory.NONE:
        lines.append(f"  Using {options.request.shared_memory.value} shared memory")
    lines.append("  Using asynchronous calls for inference")
    lines.append(f"  Stabilizing using {_judged_by(options, 'average')} latency")
    return lines


def _judged_by(options: BenchOptions, average: str) -> str:
    share = options.measurement.stability.percentile
    return average if share is None else f"p{share:g}"


class TextReport:
    """Writes as the run goes on. `bar` is notified too, so that it makes room for lines."""

    def __init__(self, options: BenchOptions, out: TextIO, bar: ProgressBar) -> None:
        self._options = options
        self._out = out
        self._bar = bar
        self._has_begun = False

    def line(self, text: str = "") -> None:
        self._bar.clear()
        self._out.write(text + "\n")
        self._out.flush()

    def _begin(self) -> None:
        """Written before the first level: a run that cannot start reports only its error."""
        if self._has_begun:
            return
        self._has_begun = True
        for line in settings_lines(self._options):
            self.line(line)
        self.line()
        for note in self._options.notes:
            self.line(f"NOTE: {note}.")

    # Watcher

    def level_began(self, value: float) -> None:
        self._begin()
        self._bar.level_began(level_name(self._options.load.mode, value))
        self.line(level_title(self._options.load.mode, value))

    def window_began(self, trial: int, seconds: float) -> None:
        self._bar.window_began(trial, seconds)

    def window_ended(self, trial: int, window: Window) -> None:
        self._bar.window_ended()
        if self._options.report.verbosity:
            share = self._options.measurement.stability.percentile
            name = "Avg" if share is None else f"p{share:g}"
            self.line(
                f"  Pass [{trial}] throughput: {_short(window.throughput)} infer/sec. {name} latency: "
                f"{window.latency.at(share):.0f} usec (std {window.latency.std_us:.0f} usec). "
            )

    def level_ended(self, level: LevelResult) -> None:
        for line in level_lines(self._options, level):
            self.line(line)
        self.line()

    def end(self, results: Results) -> None:
        self._bar.close()
        for line in summary_lines(results):
            self.line(line)
        for line in failure_lines(results):
            self.line(line)


def level_name(mode: Mode, value: float) -> str:
    if mode in (Mode.CONCURRENCY, Mode.PERIODIC):
        return f"concurrency {value:g}"
    return f"{value:g} requests/s"


def level_title(mode: Mode, value: float) -> str:
    if mode in (Mode.CONCURRENCY, Mode.PERIODIC):
        return f"Request concurrency: {value:g}"
    return f"Request Rate: {value:g} inference requests per seconds"


def _short(number: float) -> str:
    """Six digits, as perf_analyzer prints throughput."""
    return f"{number:.6g}"


def level_lines(options: BenchOptions, level: LevelResult) -> list[str]:
    """Client and server of one level."""
    window, latency = level.window, level.window.latency
    share = options.measurement.stability.percentile
    lines = ["  Client: ", f"    Request count: {window.num_requests}"]
    if window.num_failed:
        lines.append(f"    FAILED request count: {window.num_failed}")
    lines.append(f"    Throughput: {_short(window.throughput)} infer/sec")
    if window.num_responses != window.num_requests:
        lines.append(f"    Response Throughput: {_short(window.response_rate)} infer/sec")
    lines += [f"    {line}" for line in options.report.price_line("inferences", window.throughput)]
    if share is None:
        lines.append(f"    Avg latency: {latency.mean_us:.0f} usec (standard deviation {latency.std_us:.0f} usec)")
    lines += [f"    p{number:g} latency: {value:.0f} usec" for number, value in latency.percentiles.items()]
    lines.append(_split_line(options, window))
    if options.report.verbosity:
        lines.append(f"    Client CPU: {window.cpu_us:.1f} usec per request, busiest process {window.busiest:.0%}")
    if options.load.mode is not Mode.CONCURRENCY and window.num_delayed:
        lines.append(f"    Delayed requests: {window.num_delayed} (sent more than 1 msec after they were due)")
    if window.server is not None:
        lines += _server_lines(window.server.model, window.server.steps)
    else:
        lines.append("  Server: no statistics")
    return lines + _gpu_lines(options, level) + _warning_lines(level)


def _split_line(options: BenchOptions, window: Window) -> str:
    total = window.latency.mean_us
    if options.is_grpc:
        own = window.send_us + window.receive_us
        return (
            f"    Avg gRPC time: {total:.0f} usec ((un)marshal request/response {own:.0f} usec + "
            f"response wait {max(0.0, total - own):.0f} usec)"
        )
    waiting = max(0.0, total - window.send_us - window.receive_us)
    return (
        f"    Avg HTTP time: {total:.0f} usec (send {window.send_us:.0f} usec + response wait {waiting:.0f} usec + "
        f"receive {window.receive_us:.0f} usec)"
    )


def _server_lines(model: ModelCounts, steps: tuple[ModelCounts, ...]) -> list[str]:
    lines = ["  Server: ", *(f"    {line}" for line in _count_lines(model))]
    if steps:
        lines.append("")
        lines.append("  Composing models: ")
        for step in steps:
            lines.append(f"  {step.name}, version: {step.version}")
            lines += [f"      {line}" for line in _count_lines(step)]
    return lines


def _count_lines(counts: ModelCounts) -> list[str]:
    lines = [
        f"Inference count: {counts.inference_count}",
        f"Execution count: {counts.execution_count}",
    ]
    if counts.cache_hit.count or counts.cache_miss.count:
        lines.append(f"Cache hit count: {counts.cache_hit.count}")
        lines.append(f"Cache miss count: {counts.cache_miss.count}")
    lines.append(f"Successful request count: {counts.success.count}")
    if counts.fail.count:
        lines.append(f"FAILED request count: {counts.fail.count}")
    lines.append(
        f"Avg request latency: {counts.mean_us('success')} usec (overhead {counts.overhead_us} usec + "
        f"queue {counts.mean_us('queue')} usec + compute input {counts.mean_us('compute_input')} usec + "
        f"compute infer {counts.mean_us('compute_infer')} usec + "
        f"compute output {counts.mean_us('compute_output')} usec)"
    )
    return lines


def _gpu_lines(options: BenchOptions, level: LevelResult) -> list[str]:
    if not options.metrics.is_collected:
        return []
    gpu = level.gpu
    lines = ["", "  Server Prometheus Metrics: "]
    for title, values, unit, factor in (
        ("Avg GPU Utilization", gpu.utilization, "%", 100.0),
        ("Avg GPU Power Usage", gpu.power_watts, " watts", 1.0),
        ("Max GPU Memory Usage", gpu.max_memory_bytes, " bytes", 1.0),
        ("Total GPU Memory", gpu.total_memory_bytes, " bytes", 1.0),
    ):
        lines.append(f"    {title}:")
        lines += [f"      {name} : {value * factor:.6g}{unit}" for name, value in values.items()]
    return lines


def _warning_lines(level: LevelResult) -> list[str]:
    lines = []
    if not level.window.num_requests and level.num_failures:
        lines.append("  WARNING: no request succeeded in the measurement; the end of the report says why")
    elif not level.window.num_requests:
        lines.append("  WARNING: no request was answered in the measurement; is --measurement-interval too short?")
    elif not level.is_stable:
        lines.append(
            f"  WARNING: not stable within {len(level.windows)} windows; these are the last ones. "
            "Try a longer --measurement-interval or a larger --stability-percentage."
        )
    if level.is_delayed:
        share = level.window.num_delayed / level.window.num_requests
        lines.append(f"  WARNING: {share:.0%} of the requests were sent late: the server or the bench did not keep up.")
    if level.is_client_busy:
        lines.append(
            f"  WARNING: a load process used {level.window.busiest:.0%} of its CPU: the bench may be the bottleneck; "
            "raise --max-threads if there are free CPUs."
        )
    if level.num_unanswered:
        lines.append(f"  WARNING: {level.num_unanswered} requests were never answered.")
    return lines


def summary_lines(results: Results) -> list[str]:
    """One line per level; perf_analyzer's last block."""
    options = results.options
    share = options.measurement.stability.percentile
    lines = [f"Inferences/Second vs. Client {_judged_by(options, 'Average')} Batch Latency"]
    for level in results.levels:
        noun = "Concurrency" if results.mode in (Mode.CONCURRENCY, Mode.PERIODIC) else "Request Rate"
        lines.append(
            f"{noun}: {level.value:g}, throughput: {_short(level.window.throughput)} infer/sec, "
            f"latency {level.window.latency.at(share):.0f} usec"
        )
    return lines


def failure_lines(results: Results) -> list[str]:
    """Empty without failures; else the number of failures, by kind."""
    if not results.num_failures:
        return []
    lines = ["", f"!!! {results.num_failures} REQUESTS FAILED: the figures above are of the others only !!!"]
    for level in results.levels:
        for text, count in level.failures.most_common(MAX_FAILURES_SHOWN):
            lines.append(f"  {level_name(results.mode, level.value)}: {count} x {text}")
        hidden = len(level.failures) - MAX_FAILURES_SHOWN
        if hidden > 0:
            lines.append(f"  {level_name(results.mode, level.value)}: and {hidden} other kinds")
    return lines
