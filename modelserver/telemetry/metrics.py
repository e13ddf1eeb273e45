"""The metric families, made at each scrape from the models' statistics: the request path pays nothing for them.

Triton's `nv_*` families keep its names, labels and units; families of our own begin with `modelserver_`.
Counters are cumulative since a model version was loaded and begin again at a reload, as Triton's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from modelserver.cache.store import StoreCounts
from modelserver.config.metric_options import FIRST_RESPONSE_MS
from modelserver.config.schema import ModelConfig
from modelserver.telemetry.cache import cache_families
from modelserver.telemetry.caller_counts import CallerCounts
from modelserver.telemetry.gpu import GpuGauges
from modelserver.telemetry.gpu_metrics import gpu_families
from modelserver.telemetry.histogram import HistogramSnapshot
from modelserver.telemetry.host import HostGauges
from modelserver.telemetry.measurement import Measurement, measured_families
from modelserver.telemetry.model_metrics import ModelMetricsBoard
from modelserver.telemetry.rate_limit import MeasuredLimiter, limiter_families
from modelserver.telemetry.refusals import RefusalCounts
from modelserver.telemetry.residency import MeasuredResidency, residency_families
from modelserver.telemetry.shadow_counts import ShadowCounts
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import StatisticsSnapshot
from modelserver.telemetry.wire import FrontGauges, WireCounts, front_families, wire_families


class MeasuredModel(Protocol):
    """What is asked of a loaded model version."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def statistics(self) -> ModelStatistics: ...

    @property
    def load_duration_s(self) -> float: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def is_decoupled(self) -> bool: ...

    @property
    def namespace(self) -> str: ...

    def measure(self) -> Sequence[Sequence[Measurement]]:
        """What each of its instances says of itself."""


class LoadCounter(Protocol):
    """What is asked about the loads of one model."""

    @property
    def successes(self) -> int: ...

    @property
    def failures(self) -> int: ...


class MeasuredTraffic(Protocol):
    """What is asked of the weights of versions and of their shadows."""

    @property
    def counts(self) -> ShadowCounts: ...

    def weights(self) -> Mapping[str, Mapping[int, float]]: ...


@dataclass(frozen=True, slots=True)
class _Sample:
    labels: dict[str, str]
    numbers: StatisticsSnapshot
    load_duration_s: float


@dataclass(frozen=True, slots=True)
class _Family:
    """A family with one value per model version."""

    name: str
    kind: str
    help: str
    value: Callable[[_Sample], float]


_COUNTS = (
    _Family(
        "nv_inference_request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        lambda sample: sample.numbers.success.count,
    ),
    _Family(
        "nv_inference_count",
        "counter",
        "Number of inferences performed: rows of executed batches (cached requests are not counted)",
        lambda sample: sample.numbers.inference_count,
    ),
    _Family(
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed: batches (cached requests are not counted)",
        lambda sample: sample.numbers.execution_count,
    ),
    _Family(
        "nv_inference_pending_request_count",
        "gauge",
        "Number of requests that wait in the queue of the model",
        lambda sample: sample.numbers.pending,
    ),
    _Family(
        "modelserver_inflight_requests",
        "gauge",
        "Number of requests that are queued or executing",
        lambda sample: sample.numbers.inflight,
    ),
    _Family(
        "nv_model_load_duration_secs",
        "gauge",
        "Seconds that loading the model took, warmup included",
        lambda sample: sample.load_duration_s,
    ),
    _Family(
        "modelserver_model_warmup_seconds",
        "gauge",
        "Seconds that warming up the slowest instance took, a part of the load; 0 without warmup",
        lambda sample: sample.numbers.warmup_s,
    ),
    _Family(
        "modelserver_last_inference_timestamp_seconds",
        "gauge",
        "Unix time of the last execution; 0 before the first",
        lambda sample: sample.numbers.last_inference_ms / 1000,
    ),
)

_DURATIONS = (
    _Family(
        "nv_inference_request_duration_us",
        "counter",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda sample: sample.numbers.success.ns // 1000,
    ),
    _Family(
        "nv_inference_queue_duration_us",
        "counter",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda sample: sample.numbers.queue.ns // 1000,
    ),
    _Family(
        "nv_inference_compute_input_duration_us",
        "counter",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda sample: sample.numbers.compute_input.ns // 1000,
    ),
    _Family(
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda sample: sample.numbers.compute_infer.ns // 1000,
    ),
    _Family(
        "nv_inference_compute_output_duration_us",
        "counter",
        "Cumulative compute output duration in microseconds (does not include cached requests)",
        lambda sample: sample.numbers.compute_output.ns // 1000,
    ),
)

# Name, help, which histogram.
_HISTOGRAMS: tuple[tuple[str, str, Callable[[StatisticsSnapshot], HistogramSnapshot]], ...] = (
    (
        "modelserver_request_duration_seconds",
        "Time from arrival to answer of successful requests",
        lambda numbers: numbers.request_histogram,
    ),
    (
        "modelserver_queue_duration_seconds",
        "Time that successful requests waited in the queue",
        lambda numbers: numbers.queue_histogram,
    ),
    (
        "modelserver_compute_infer_duration_seconds",
        "Time that the backend took for the batches of successful requests",
        lambda numbers: numbers.compute_infer_histogram,
    ),
)
_FIRST_RESPONSE = (
    FIRST_RESPONSE_MS,
    "Time from the arrival of a request to its first response in milliseconds (decoupled models)",
    lambda numbers: numbers.first_response_histogram,
)
_BATCH_ROWS = (
    "modelserver_batch_rows",
    "Rows of the executed batches",
    lambda numbers: numbers.batch_rows_histogram,
)


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Which optional families are made: `counter_latencies` and `histogram_latencies` of --metrics-config."""

    has_duration_counters: bool = True
    has_duration_histograms: bool = True


class ServerMetrics:
    """Makes all families on request. `models` and `load_counts` are asked on the event loop thread."""

    def __init__(
        self,
        models: Callable[[], Iterable[MeasuredModel]],
        load_counts: Callable[[], Mapping[str, LoadCounter]],
        *,
        server_version: str,
        refusals: RefusalCounts | None = None,
        host: HostGauges | None = None,
        gpus: GpuGauges | None = None,
        wire: WireCounts | None = None,
        fronts: Callable[[], Sequence[FrontGauges]] = list,
        answers: StoreCounts | None = None,
        limiter: MeasuredLimiter | None = None,
        callers: CallerCounts | None = None,
        residency: MeasuredResidency | None = None,
        traffic: MeasuredTraffic | None = None,
        model_metrics: ModelMetricsBoard | None = None,
        options: MetricsOptions | None = None,
    ) -> None:
        self._model_metrics = model_metrics
        self._models = models
        self._load_counts = load_counts
        self._server_version = server_version
        self._refusals = refusals or RefusalCounts()
        self._host = host
        self._gpus = gpus
        self._wire = wire
        self._fronts = fronts
        self._answers = answers
        self._limiter = limiter
        self._callers = callers
        self._residency = residency
        self._traffic = traffic
        self._options = options or MetricsOptions()
        self._process = ProcessCollector(registry=None)

    def collect(self) -> list[Metric]:
        """Every family, in a fixed order; those of models have no sample while there is no model."""
        models = list(self._models())
        samples = [_Sample(_labels(model), model.statistics.snapshot(), model.load_duration_s) for model in models]
        families = [*map(_family_maker(samples), _COUNTS), _failures(samples)]
        if self._options.has_duration_counters:
            families += map(_family_maker(samples), _DURATIONS)
        histograms = (*_HISTOGRAMS, _BATCH_ROWS) if self._options.has_duration_histograms else (_BATCH_ROWS,)
        families += [_histogram(name, text, samples, pick) for name, text, pick in histograms]
        if self._options.has_duration_histograms:
            decoupled = [sample for model, sample in zip(models, samples, strict=True) if model.is_decoupled]
            families.append(_histogram(*_FIRST_RESPONSE[:2], decoupled, _FIRST_RESPONSE[2]))
        if self._answers is not None:
            families += cache_families(
                self._answers,
                [
                    (sample.labels, sample.numbers)
                    for model, sample in zip(models, samples, strict=True)
                    if model.config.response_cache is not None and model.config.response_cache.enable
                ],
            )
        if self._limiter is not None:
            families += limiter_families(self._limiter)
        if self._callers is not None:
            families += self._callers.families()
        if self._residency is not None:
            families += residency_families(self._residency)
        if self._traffic is not None:
            families += self._traffic.counts.families(self._traffic.weights)
        families += _load_families(self._load_counts())
        families.append(_refusal_family(self._refusals))
        if self._wire is not None:
            families += wire_families(self._wire)
        families += front_families(self._fronts())
        if self._host is not None:
            families += _host_families(self._host)
        if self._gpus is not None:
            families += gpu_families(self._gpus.read())
        families += measured_families(
            # vLLM's dashboards ask for `model_name` and `engine`, Triton's for `model` and `version`.
            ({**sample.labels, "model_name": model.name, "engine": str(position)}, measurements)
            for model, sample in zip(models, samples, strict=True)
            for position, measurements in enumerate(model.measure())
        )
        if self._model_metrics is not None:
            families += self._model_metrics.families()
        info = Metric("modelserver_build_info", "Version of the server; the value is always 1", "gauge")
        info.add_sample(info.name, {"version": self._server_version}, 1)
        return [*families, info, *self._process.collect()]


def _labels(model: MeasuredModel) -> dict[str, str]:
    """Name, version, namespace if there are any, and the `metric_tags` of the config, marked by an underscore."""
    tags = {f"_{key}": value for key, value in model.config.metric_tags.items()}
    namespace = {"namespace": model.namespace} if model.namespace else {}
    return {"model": model.name, **namespace, "version": str(model.version), **tags}


def _family_maker(samples: Sequence[_Sample]) -> Callable[[_Family], Metric]:
    def make(family: _Family) -> Metric:
        metric = Metric(family.name, family.help, family.kind)
        for sample in samples:
            metric.add_sample(family.name, sample.labels, family.value(sample))
        return metric

    return make


def _failures(samples: Sequence[_Sample]) -> Metric:
    metric = Metric(
        "nv_inference_request_failure",
        "Number of failed inference requests by reason: REJECTED by the queue, CANCELED, BACKEND, OTHER",
        "counter",
    )
    for sample in samples:
        for reason, count in sample.numbers.failures.items():
            metric.add_sample(metric.name, {**sample.labels, "reason": reason.value}, count)
    return metric


def _histogram(
    name: str, text: str, samples: Sequence[_Sample], pick: Callable[[StatisticsSnapshot], HistogramSnapshot]
) -> Metric:
    metric = Metric(name, text, "histogram")
    for sample in samples:
        histogram = pick(sample.numbers)
        total = 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            total += count
            limit = "+Inf" if bound == float("inf") else repr(float(bound))
            metric.add_sample(f"{name}_bucket", {**sample.labels, "le": limit}, total)
        metric.add_sample(f"{name}_count", sample.labels, total)
        metric.add_sample(f"{name}_sum", sample.labels, histogram.sum)
    return metric


def _load_families(counts: Mapping[str, LoadCounter]) -> list[Metric]:
    loads = Metric("modelserver_model_loads", "Successful loads and reloads of the model since start", "counter")
    failures = Metric("modelserver_model_load_failures", "Failed loads and reloads of the model since start", "counter")
    for name, counter in sorted(counts.items()):
        loads.add_sample(f"{loads.name}_total", {"model": name}, counter.successes)
        failures.add_sample(f"{failures.name}_total", {"model": name}, counter.failures)
    return [loads, failures]


def _refusal_family(refusals: RefusalCounts) -> Metric:
    metric = Metric(
        "modelserver_requests_refused",
        "Inference requests that no model accepted: UNKNOWN_MODEL, UNAVAILABLE (not ready, stopping), INVALID, OTHER",
        "counter",
    )
    for reason, count in refusals.snapshot().items():
        metric.add_sample(f"{metric.name}_total", {"reason": reason.value}, count)
    return metric


def _host_families(host: HostGauges) -> list[Metric]:
    reading = host.read()
    values = (
        ("nv_cpu_utilization", "Share of the CPUs in use, 0.0 to 1.0", reading.cpu_utilization),
        ("nv_cpu_memory_total_bytes", "Memory that the server may use, in bytes", reading.memory_total_bytes),
        ("nv_cpu_memory_used_bytes", "Memory in use, in bytes", reading.memory_used_bytes),
        # Triton's dashboards ask for them.
        ("nv_pinned_memory_pool_total_bytes", "Size of the pool of pinned memory: there is none", 0),
        ("nv_pinned_memory_pool_used_bytes", "Pinned memory in use of the pool, in bytes", 0),
    )
    families = []
    for name, text, value in values:
        metric = Metric(name, text, "gauge")
        metric.add_sample(name, {}, value)
        families.append(metric)
    return families
