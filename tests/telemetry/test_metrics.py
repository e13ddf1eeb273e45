"""The metric families: names, labels, values, and both text formats read back by Prometheus' own parsers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import prometheus_client.openmetrics.parser
import prometheus_client.parser
import pytest
from support.http_calls import Exchange

from modelserver.auth.access import Access
from modelserver.auth.guard import Guard
from modelserver.config.schema import ModelConfig
from modelserver.errors import ErrorCode
from modelserver.frontends.http.frontend import HttpFrontend
from modelserver.frontends.http.metrics import Metrics
from modelserver.protocol.response import HttpResponse
from modelserver.telemetry.counts import LoadCounts, RefusalCounts, RefusalReason
from modelserver.telemetry.exposition import accepts_openmetrics
from modelserver.telemetry.host import HostGauges
from modelserver.telemetry.measurement import Measurement, RestartReason
from modelserver.telemetry.metrics import ServerMetrics
from modelserver.telemetry.model_families import MetricsOptions
from modelserver.telemetry.model_metrics import ModelMetricsBoard
from modelserver.telemetry.statistics import BatchTiming, ModelStatistics, ResponseKind
from modelserver.telemetry.statistics_snapshot import FailureReason
from tests.support.metrics_pages import render_openmetrics, render_text


@dataclass
class LoadedModel:
    name: str
    version: int = 1
    load_duration_s: float = 0.25
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    config: ModelConfig = field(default_factory=ModelConfig)
    namespace: str = ""
    is_decoupled: bool = False
    measured: Sequence[Sequence[Measurement]] = ()

    @property
    def measures(self) -> bool:
        return bool(self.measured)

    def measure(self) -> Sequence[Sequence[Measurement]]:
        return self.measured


def worked_model() -> LoadedModel:
    """A model that executed a batch of two requests with three rows, and failed some."""
    model = LoadedModel('odd"name\\', 3, statistics=ModelStatistics(pending=lambda: 4, inflight=lambda: 6))
    timing = BatchTiming(compute_input_ns=1_000_000, compute_infer_ns=2_000_000, compute_output_ns=3_000_000)
    model.statistics.record_batch(3, timing, queue_ns=[500_000, 700_000], request_ns=[7_000_000, 70_000_000])
    model.statistics.record_failures(FailureReason.REJECTED, [1, 1])
    model.statistics.record_failures(FailureReason.CANCELED, [1])
    return model


def metrics(*models: LoadedModel, **details: Any) -> ServerMetrics:
    counts = {model.name: LoadCounts(successes=2, failures=1) for model in models}
    return ServerMetrics(lambda: models, lambda: counts, server_version="1.2.3", **details)


def values(families: Iterable[Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def parse_text(server_metrics: ServerMetrics) -> dict[Any, float]:
    text = render_text(server_metrics.collect()).decode()
    found = values(prometheus_client.parser.text_string_to_metric_families(text))
    # This parser, unlike Prometheus, puts _total behind the names of counters.
    return {(re.sub(r"^(nv_.*)_total$", r"\1", name), labels): value for (name, labels), value in found.items()}


def parse_openmetrics(server_metrics: ServerMetrics) -> dict[Any, float]:
    text = render_openmetrics(server_metrics.collect()).decode()
    return values(prometheus_client.openmetrics.parser.text_string_to_metric_families(text))


EXPECTED: list[tuple[str, dict[str, str], float]] = [
    ("nv_inference_request_success", {}, 2),
    ("nv_inference_request_failure", {"reason": "REJECTED"}, 2),
    ("nv_inference_request_failure", {"reason": "CANCELED"}, 1),
    ("nv_inference_request_failure", {"reason": "BACKEND"}, 0),
    ("nv_inference_request_failure", {"reason": "OTHER"}, 0),
    ("nv_inference_count", {}, 3),
    ("nv_inference_exec_count", {}, 1),
    ("nv_inference_pending_request_count", {}, 4),
    ("modelserver_inflight_requests", {}, 6),
    ("modelserver_running_requests", {}, 2),
    ("nv_model_load_duration_secs", {}, 0.25),
    ("nv_inference_request_duration_us", {}, 77_000),
    ("nv_inference_queue_duration_us", {}, 1200),
    ("nv_inference_compute_input_duration_us", {}, 2000),
    ("nv_inference_compute_infer_duration_us", {}, 4000),
    ("nv_inference_compute_output_duration_us", {}, 6000),
    ("modelserver_request_duration_seconds_bucket", {"le": "0.005"}, 0),
    ("modelserver_request_duration_seconds_bucket", {"le": "0.01"}, 1),
    ("modelserver_request_duration_seconds_bucket", {"le": "0.1"}, 2),
    ("modelserver_request_duration_seconds_bucket", {"le": "+Inf"}, 2),
    ("modelserver_request_duration_seconds_count", {}, 2),
    ("modelserver_request_duration_seconds_sum", {}, 0.077),
    ("modelserver_queue_duration_seconds_count", {}, 2),
    ("modelserver_compute_infer_duration_seconds_sum", {}, 0.004),
    ("modelserver_batch_rows_bucket", {"le": "2.0"}, 0),
    ("modelserver_batch_rows_bucket", {"le": "4.0"}, 1),
    ("modelserver_batch_rows_sum", {}, 3),
]


@pytest.mark.parametrize("parse", [parse_text, parse_openmetrics])
@pytest.mark.parametrize(("name", "labels", "value"), EXPECTED)
def test_a_model_has_each_number_in_both_formats(
    parse: Callable[[ServerMetrics], dict[Any, float]], name: str, labels: dict[str, str], value: float
) -> None:
    model = worked_model()
    if parse is parse_text and "le" in labels:
        labels = {"le": labels["le"].removesuffix(".0")}  # as Triton writes it; OpenMetrics demands the fraction
    key = tuple(sorted({"model": model.name, "version": "3", **labels}.items()))
    assert parse(metrics(model))[name, key] == pytest.approx(value)


def test_loads_and_failed_loads_are_counted_by_model() -> None:
    found = parse_text(metrics(LoadedModel("m")))
    assert found["modelserver_model_loads_total", (("model", "m"),)] == 2
    assert found["modelserver_model_load_failures_total", (("model", "m"),)] == 1


def test_refused_requests_are_counted_by_reason() -> None:
    refusals = RefusalCounts()
    refusals.record(ErrorCode.NOT_FOUND)
    refusals.record(ErrorCode.INTERNAL)
    found = parse_text(metrics(on_loop=[refusals.families]))
    counts = {
        reason: found["modelserver_requests_refused_total", (("reason", reason.value),)] for reason in RefusalReason
    }
    assert counts == {
        RefusalReason.UNKNOWN_MODEL: 1,
        RefusalReason.UNAVAILABLE: 0,
        RefusalReason.INVALID: 0,
        RefusalReason.OVERLOADED: 0,
        RefusalReason.OTHER: 1,
    }


def test_every_version_has_its_own_numbers() -> None:
    second = LoadedModel("m", 2)
    second.statistics.record_failures(FailureReason.OTHER, [1])
    found = parse_text(metrics(LoadedModel("m", 1), second))
    key = (("model", "m"), ("reason", "OTHER"))
    assert found["nv_inference_request_failure", (*key, ("version", "1"))] == 0
    assert found["nv_inference_request_failure", (*key, ("version", "2"))] == 1


def test_the_tags_of_a_model_are_labels_of_its_metrics_alone() -> None:
    tagged = LoadedModel("m", config=ModelConfig(metric_tags={"team": "vision", "le": "x"}))
    found = parse_text(metrics(tagged, LoadedModel("n")))
    tags = (("_le", "x"), ("_team", "vision"))
    for name in ("nv_inference_count", "nv_inference_queue_duration_us", "nv_model_load_duration_secs"):
        assert found[name, (*tags, ("model", "m"), ("version", "1"))] == pytest.approx(0, abs=0.25)
        assert (name, (("model", "n"), ("version", "1"))) in found
    assert ("nv_inference_request_failure", (*tags, ("model", "m"), ("reason", "OTHER"), ("version", "1"))) in found
    bucket = (*tags, ("le", "+Inf"), ("model", "m"), ("version", "1"))
    assert ("modelserver_request_duration_seconds_bucket", bucket) in found
    assert ("modelserver_model_loads_total", (("model", "m"),)) in found


def test_counters_have_the_type_of_counters_under_tritons_names() -> None:
    text = render_text(metrics(worked_model()).collect()).decode()
    assert "# TYPE nv_inference_count counter" in text
    assert "# HELP nv_inference_count " in text
    assert "# TYPE modelserver_model_loads_total counter" in text


def test_every_family_is_described_once() -> None:
    families = metrics(worked_model(), off_loop=[HostGauges(1.0).families]).collect()
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    assert all(family.documentation for family in families)


def test_what_a_model_names_as_the_server_does_is_in_the_servers_family_or_nowhere() -> None:
    board = ModelMetricsBoard()
    for name, kind in (("nv_inference_count", "counter"), ("process_open_fds", "counter"), ("my_own", "gauge")):
        family = board.ask(board, "metric_family", {"name": name, "description": "a model's", "kind": kind})
        board.ask(board, "metric_new", {"family": family, "labels": {"model": "mine"}, "buckets": ()})
    page = render_text(metrics(worked_model(), model_metrics=board).collect()).decode().splitlines()
    described = [line.split()[2] for line in page if line.startswith("# TYPE ")]
    assert len(described) == len(set(described))
    assert [line for line in page if 'model="mine"' in line] == [
        'nv_inference_count{model="mine"} 0.0',
        'my_own{model="mine"} 0.0',
    ]


CHANGES: dict[str, Callable[[ModelStatistics], object]] = {
    "a batch": lambda each: each.record_batch(2, BatchTiming(1, 2, 3), queue_ns=[1], request_ns=[9]),
    "a lone request": lambda each: each.record_lone(1, 1, 2, 3, 4, 5),
    "a late answer": lambda each: each.record_ended(1, 2, 3, 4, 5),
    "a response": lambda each: each.record_response(0, ResponseKind.SUCCESS, 1, 2),
    "a first response": lambda each: each.record_first_response(1),
    "a failed execution": lambda each: each.record_failed_execution(),
    "padding": lambda each: each.record_padding(1),
    "failures": lambda each: each.record_failures(FailureReason.OTHER, [1]),
    "a cache hit": lambda each: each.record_cache_hit(1, 1),
    "a cache miss": lambda each: each.record_cache_miss(1),
    "a process": lambda each: each.process_restarts.expect(),
    "a restart": lambda each: each.process_restarts.record(RestartReason.HUNG),
    "a warmup": lambda each: setattr(each, "warmup_s", 1.5),
    "the queue": lambda each: setattr(each, "pending", lambda: 3),
    "requests in flight": lambda each: setattr(each, "inflight", lambda: 3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_scrape_shows_what_changed_since_the_one_before(change: Callable[[ModelStatistics], object]) -> None:
    statistics = ModelStatistics(first_response_bounds_ms=(1.0,), is_decoupled=True, summary_quantiles=(0.5,))
    models = (LoadedModel("changed", statistics=statistics), LoadedModel("idle"))

    def page(scraped: ServerMetrics) -> list[str]:
        lines = render_text(scraped.collect()).decode().splitlines()
        return [line for line in lines if line.startswith("# ") or 'model="' in line]

    kept = metrics(*models)
    assert page(kept) == page(kept) == page(metrics(*models))
    for _ in range(2):
        change(statistics)
        assert page(kept) == page(metrics(*models))


def test_a_page_of_many_models_is_that_of_a_first_scrape() -> None:
    models = tuple(LoadedModel(f"model_{number:03}") for number in range(130))
    counts = {model.name: LoadCounts(successes=1) for model in models}
    kept = ServerMetrics(lambda: models, lambda: dict(counts), server_version="1.2.3")

    def pages(scraped: ServerMetrics) -> list[str]:
        texts = [render(scraped.collect()).decode() for render in (render_text, render_openmetrics)]
        return [line for text in texts for line in text.splitlines() if line.startswith("# ") or 'model="' in line]

    def fresh() -> ServerMetrics:
        return ServerMetrics(lambda: models, lambda: counts, server_version="1.2.3")

    first = pages(kept)
    assert len(first) > 130 * 2 * 30
    assert first == pages(kept) == pages(fresh())
    models[129].statistics.record_lone(1, 1, 1, 1, 1, 1)
    counts["model_003"] = LoadCounts(successes=1, failures=1)
    changed = pages(kept)
    assert len(set(changed) - set(first)) > 10
    assert changed == pages(fresh())
    models = (*models[:70], LoadedModel("new"), *models[72:])
    counts["new"] = LoadCounts(successes=1)
    assert pages(kept) == pages(fresh())


def test_optional_families_can_be_left_out_and_the_counts_stay() -> None:
    options = MetricsOptions(has_duration_counters=False, has_duration_histograms=False)
    names = {name for name, _ in parse_text(metrics(worked_model(), options=options))}
    assert not any(name.endswith("_duration_us") or "_duration_seconds" in name for name in names)
    assert {"nv_inference_count", "nv_inference_request_success", "modelserver_batch_rows_count"} <= names


def test_a_server_without_models_has_the_hosts_and_the_process_metrics() -> None:
    found = {name for name, _ in parse_text(metrics(off_loop=[HostGauges(1.0).families]))}
    assert {"nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"} <= found
    assert {"nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes"} <= found
    assert {"modelserver_build_info", "process_resident_memory_bytes", "process_cpu_seconds_total"} <= found
    assert "nv_cpu_utilization" not in {name for name, _ in parse_text(metrics())}


def test_instances_measure_themselves() -> None:
    def measured(running: float, times: tuple[int, int]) -> list[Measurement]:
        return [
            Measurement("vllm:running", "gauge", "Now", running),
            Measurement("vllm:ended", "counter", "By reason", 3.0, {"reason": "stop"}),
            Measurement("vllm:seconds", "histogram", "How long", 2.5, bounds=(1.0,), counts=times),
        ]

    model = LoadedModel("llm", 2, measured=[measured(4.0, (1, 2)), measured(5.0, (0, 0))])
    for found, one in ((parse_text(metrics(model)), "1"), (parse_openmetrics(metrics(model)), "1.0")):
        of = {"engine": "0", "model": "llm", "model_name": "llm", "version": "2"}
        assert found["vllm:running", tuple(sorted(of.items()))] == 4.0
        assert found["vllm:running", tuple(sorted({**of, "engine": "1"}.items()))] == 5.0
        assert found["vllm:ended_total", tuple(sorted({**of, "reason": "stop"}.items()))] == 3.0
        buckets = {le: found["vllm:seconds_bucket", tuple(sorted({**of, "le": le}.items()))] for le in (one, "+Inf")}
        assert buckets == {one: 1, "+Inf": 3}
        assert found["vllm:seconds_sum", tuple(sorted(of.items()))] == 2.5


def test_what_waits_in_the_queue_is_added_once() -> None:
    waiting = [Measurement("vllm:waiting", "gauge", "Now", 2.0, adds_queue=True)]
    statistics = ModelStatistics(pending=lambda: 7)
    found = parse_text(metrics(LoadedModel("llm", statistics=statistics, measured=[waiting, waiting])))
    of = {"model": "llm", "model_name": "llm", "version": "1"}
    assert [found["vllm:waiting", tuple(sorted({**of, "engine": engine}.items()))] for engine in "01"] == [9.0, 2.0]


def answer(path: str, *, method: str = "GET", accept: str = "") -> HttpResponse:
    exchange = Exchange(method, path, {"accept": accept} if accept else {})

    async def ask() -> None:
        made = metrics(worked_model())
        api = Metrics(made.collect_slices, made.load).api()
        HttpFrontend([api], Guard(Access())).handle(exchange)
        while not exchange.responses:  # noqa: ASYNC110  # an exchange has no event
            await asyncio.sleep(0.001)

    asyncio.run(ask())
    (only,) = exchange.responses
    return only


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/metrics", "GET", 200), ("/metrics/", "GET", 200), ("/metrics", "HEAD", 200), ("/", "GET", 404),
     ("/v2/health/live", "GET", 404), ("/metrics", "POST", 405)],
)  # fmt: skip
def test_one_path_answers(path: str, method: str, status: int) -> None:
    assert answer(path, method=method).status == status


def test_the_scraper_chooses_the_format() -> None:
    plain, openmetrics = answer("/metrics"), answer("/metrics", accept="application/openmetrics-text;version=1.0.0,*/*")
    assert dict(plain.headers)["Content-Type"].startswith("text/plain; version=0.0.4")
    assert dict(openmetrics.headers)["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert b"".join(openmetrics.body).endswith(b"# EOF\n")
    assert not accepts_openmetrics("text/plain, */*")
