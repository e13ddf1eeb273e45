"""Text, CSV, export, JSON and HTML of the same results."""

from __future__ import annotations

import csv
import json
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.bench_results import level, results

from modelserver.bench.options import BenchOptions, LoadOptions, MeasurementOptions, MetricsOptions, Mode, ReportOptions
from modelserver.bench.report_files import export_document, results_document, write_csv
from modelserver.bench.report_html import html_report
from modelserver.bench.report_text import failure_lines, level_lines, settings_lines, summary_lines
from modelserver.bench.results import Results
from modelserver.bench.server_statistics import GpuMetrics
from modelserver.bench.window import Stability
from modelserver.errors import ServerError

# As perf_analyzer 2.41 writes it.
COLUMNS = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency"
)


def write(given: Results, tmp_path: Path) -> list[list[str]]:
    write_csv(given, tmp_path / "o.csv")
    with (tmp_path / "o.csv").open() as file:
        return list(csv.reader(file))


def test_csv_columns_are_those_of_perf_analyzer(tmp_path: Path) -> None:
    rows = write(results(level(1, latency_us=100)), tmp_path)
    assert ",".join(rows[0]) == COLUMNS
    # What is not sending, receiving or in the model is network: 100 - 3 - 2 - 35.
    assert rows[1] == ["1", "100", "3", "60", "10", "1", "20", "4", "2", "100", "100", "100", "100"]


def test_csv_rows_are_sorted_by_throughput(tmp_path: Path) -> None:
    rows = write(results(level(1, num_requests=50), level(2, num_requests=90), level(4, num_requests=70)), tmp_path)
    assert [row[0] for row in rows[1:]] == ["1", "4", "2"]


def test_verbose_csv_has_more_columns(tmp_path: Path) -> None:
    options = BenchOptions("m", report=ReportOptions(is_csv_verbose=True), metrics=MetricsOptions(is_collected=True))
    gpu = GpuMetrics({"GPU-a": 0.5}, {"GPU-a": 50.5}, {"GPU-a": 10.0}, {"GPU-a": 20.0, "GPU-b": 30.0})
    rows = write(results(level(1, gpu=gpu), options=options), tmp_path)
    assert ",".join(rows[0]) == COLUMNS + (
        ",Avg latency,request/response,response wait,Avg GPU Utilization,Avg GPU Power Usage,Max GPU Memory Usage,"
        "Total GPU Memory"
    )
    assert rows[1][13:] == ["100", "5", "95", "GPU-a:0.5;", "GPU-a:50.5;", "GPU-a:10;", "GPU-a:20;GPU-b:30;"]


def test_csv_of_rates_percentiles_caches_and_streams(tmp_path: Path) -> None:
    options = BenchOptions(
        "m",
        load=LoadOptions(mode=Mode.REQUEST_RATE),
        report=ReportOptions(is_csv_verbose=True),
        measurement=MeasurementOptions(stability=Stability(percentile=75)),
    )
    head = write(results(level(2.5, percentile=75), options=options, has_cache=True, is_decoupled=True), tmp_path)[0]
    assert head[0] == "Request Rate"
    assert head[8:10] == ["Server Cache Hit", "Server Cache Miss"]
    assert head[11:13] == ["p50 latency", "p75 latency"]
    assert "Avg latency" not in head
    assert head[-1] == "Response Throughput"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="-f: cannot write"):
        write_csv(results(level(1)), tmp_path / "no" / "o.csv")


def test_the_export_has_the_times_of_every_request() -> None:
    document = export_document(results(level(4, num_requests=3)), 1000)
    (experiment,) = document["experiments"]
    assert experiment["experiment"] == {"mode": "concurrency", "value": 4}
    assert experiment["window_boundaries"] == [1000, 1000, 1000, 1_000_001_000]
    assert [set(request) for request in experiment["requests"]] == [{"timestamp", "response_timestamps"}] * 3
    first = experiment["requests"][1]
    assert first["response_timestamps"][0] - first["timestamp"] == 100_000
    assert document["version"]
    json.dumps(document)


def test_the_export_of_streams_has_all_responses() -> None:
    one = level(1, num_requests=3)
    assert one.harvest is not None
    one.harvest.num_responses = one.harvest.times[:, 0] * 0 + [2, 0, 1]
    one.harvest.response_times = one.harvest.times[:, 0] * 0 + [5, 6, 7]
    requests = export_document(results(one), 0)["experiments"][0]["requests"]
    assert [request["response_timestamps"] for request in requests] == [[5, 6], [], [7]]


def test_json_is_json_and_names_its_units() -> None:
    document = json.loads(json.dumps(results_document(results(level(1), level(8, latency_us=400)))))
    assert [one["value"] for one in document["levels"]] == [1, 8]
    one = document["levels"][1]
    assert one["throughput"] == pytest.approx(100)
    assert one["latency"]["p99_us"] == 400
    assert one["server"]["queue_us"] == 10
    assert sum(one["latency"]["histogram"]["counts"]) == 100


def test_the_text_has_the_lines_of_perf_analyzer() -> None:
    given = results(level(1), level(8, latency_us=400))
    lines = level_lines(given.options, given.levels[0])
    assert "    Request count: 100" in lines
    assert "    Throughput: 100 infer/sec" in lines
    assert "    Avg latency: 100 usec (standard deviation 0 usec)" in lines
    assert "    p99 latency: 100 usec" in lines
    assert "    Avg HTTP time: 100 usec (send 3 usec + response wait 95 usec + receive 2 usec)" in lines
    assert (
        "    Avg request latency: 40 usec (overhead 5 usec + queue 10 usec + compute input 1 usec + "
        "compute infer 20 usec + compute output 4 usec)"
    ) in lines
    assert summary_lines(given) == [
        "Inferences/Second vs. Client Average Batch Latency",
        "Concurrency: 1, throughput: 100 infer/sec, latency 100 usec",
        "Concurrency: 8, throughput: 100 infer/sec, latency 400 usec",
    ]
    assert settings_lines(given.options)[0] == "*** Measurement Settings ***"


def test_failures_are_told_loudly() -> None:
    failures = Counter({"HTTP 400: no": 7, "gone": 1})
    given = results(level(1, failures=failures, num_unanswered=2))
    assert given.num_failures == 10
    assert not given.is_good
    lines = failure_lines(given)
    assert "10 REQUESTS FAILED" in lines[1]
    assert lines[2] == "  concurrency 1: 7 x HTTP 400: no"
    assert failure_lines(results(level(1))) == []
    assert results(level(1)).is_good


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"is_stable": False}, "not stable within 3 windows"),
        ({"num_unanswered": 3}, "3 requests were never answered"),
    ],
)
def test_doubts_are_warned_of(changes: dict[str, object], warning: str) -> None:
    given = results(level(1, **changes))
    assert warning in "\n".join(level_lines(given.options, given.levels[0]))


@pytest.mark.parametrize(
    ("failures", "warning"),
    [(Counter({"HTTP 400: no": 7}), "no request succeeded"), (Counter[str](), "is --measurement-interval too short?")],
)
def test_a_level_without_answers_is_told_why(failures: Counter[str], warning: str) -> None:
    one = level(1, failures=failures)
    one.window = replace(one.window, latency=replace(one.window.latency, count=0))
    text = "\n".join(level_lines(BenchOptions("m"), one))
    assert text.count("WARNING") == 1
    assert warning in text


def test_a_busy_client_and_late_requests_are_warned_of() -> None:
    one = level(100)
    one.window = replace(one.window, busiest=0.99, num_delayed=50)
    text = "\n".join(level_lines(BenchOptions("m", load=LoadOptions(mode=Mode.REQUEST_RATE)), one))
    assert "the bench may be the bottleneck" in text
    assert "50% of the requests were sent late" in text


class Page(HTMLParser):
    """Notes what a page would load, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.foreign += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "rect", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("line", "rect", "circle", "polyline"):
            return
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.foreign += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else_and_is_well_formed() -> None:
    failures = Counter({"<script>alert(1)</script>": 1})
    text = html_report(results(level(1), level(8, latency_us=900, failures=failures)))
    page = Page()
    page.feed(text)
    assert page.foreign == []
    assert page.open == []
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    assert text.count("<svg") == 5


def test_the_page_of_a_run_without_answers_or_statistics() -> None:
    one = level(1, num_requests=1)
    one.window = replace(one.window, before=None, after=None)
    assert "Where the time goes" not in html_report(results(one))
