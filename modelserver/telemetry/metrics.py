"""The metric families, made at each scrape from the models' statistics, at no cost to the request path.

Triton's `nv_*` families keep its names, labels and units; families of our own begin with `modelserver_`.
Counters are cumulative since a model version was loaded and begin again at a reload, as Triton's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from modelserver.cache.store import StoreCounts
from modelserver.core.long_work import Slices, finish
from modelserver.telemetry.counts import (
    CallerCounts,
    LoadCounts,
    MeasuredLimiter,
    MeasuredOnDemand,
    RefusalCounts,
    ShadowCounts,
    limiter_families,
    on_demand_families,
)
from modelserver.telemetry.exposition import exposed_name, has_samples
from modelserver.telemetry.file_reloads import FileReloads
from modelserver.telemetry.gpu import GpuGauges, gpu_families
from modelserver.telemetry.host import HostGauges
from modelserver.telemetry.measurement import measured_families, with_queue
from modelserver.telemetry.model_families import MeasuredModel, MetricsOptions, ModelFamilies
from modelserver.telemetry.model_metrics import ModelMetricsBoard
from modelserver.telemetry.statistics_snapshot import StatisticsSnapshot
from modelserver.telemetry.wire_counts import FrontGauges, WireCounts, front_families, wire_families


def cache_families(counts: StoreCounts, models: Iterable[tuple[Mapping[str, str], StatisticsSnapshot]]) -> list[Metric]:
    """`models` are the labels and numbers of models with cached responses."""
    return [*_store_families(counts), *_model_families(models)]


def _store_families(counts: StoreCounts) -> list[Metric]:
    share = counts.num_bytes / counts.max_bytes if counts.max_bytes else 0.0
    values = (
        ("nv_cache_util", "gauge", "Share of the response cache's memory in use, 0.0 to 1.0", share),
        ("nv_cache_num_entries", "gauge", "Number of responses in the response cache", counts.num_entries),
        ("nv_cache_num_lookups", "counter", "Number of lookups in the response cache", counts.lookups),
        ("nv_cache_num_hits", "counter", "Number of lookups that found a response", counts.hits),
        ("nv_cache_num_misses", "counter", "Number of lookups that found no response", counts.misses),
        ("nv_cache_num_evictions", "counter", "Number of responses that gave way to others", counts.evictions),
        (
            "nv_cache_lookup_duration",
            "counter",
            "Cumulative duration of lookups in microseconds",
            counts.lookup_ns // 1000,
        ),
        (
            "nv_cache_insertion_duration",
            "counter",
            "Cumulative duration of insertions in microseconds",
            counts.insertion_ns // 1000,
        ),
        ("modelserver_cache_bytes", "gauge", "Memory that the responses in the cache take, in bytes", counts.num_bytes),
        (
            "modelserver_cache_failures",
            "counter",
            "Number of lookups and insertions that the cache's server did not answer in time",
            counts.failures,
        ),
    )
    families = []
    for name, kind, text, value in values:
        metric = Metric(name, text, kind)
        metric.add_sample(f"{name}_total" if name == "modelserver_cache_failures" else name, {}, value)
        families.append(metric)
    return families


def _model_families(models: Iterable[tuple[Mapping[str, str], StatisticsSnapshot]]) -> list[Metric]:
    hits = Metric("nv_cache_num_hits_per_model", "Number of cache hits per model", "counter")
    hit_us = Metric("nv_cache_hit_duration_per_model", "Total cache hit duration per model, in microseconds", "counter")
    misses = Metric("nv_cache_num_misses_per_model", "Number of cache misses per model", "counter")
    miss_us = Metric(
        "nv_cache_miss_duration_per_model",
        "Total cache miss duration per model, insertion included, in microseconds",
        "counter",
    )
    for labels, numbers in models:
        hits.add_sample(hits.name, dict(labels), numbers.cache_hit.count)
        hit_us.add_sample(hit_us.name, dict(labels), numbers.cache_hit.ns // 1000)
        misses.add_sample(misses.name, dict(labels), numbers.cache_miss.count)
        miss_us.add_sample(miss_us.name, dict(labels), numbers.cache_miss.ns // 1000)
    return [hits, hit_us, misses, miss_us]


class ServerMetrics:
    """Makes all families on request. `models` is called on the event loop thread, and returns the same tuple
    until a model is loaded or unloaded; `load_counts` is called from any thread."""

    def __init__(
        self,
        models: Callable[[], tuple[MeasuredModel, ...]],
        load_counts: Callable[[], Mapping[str, LoadCounts]],
        *,
        server_version: str,
        refusals: RefusalCounts | None = None,
        host: HostGauges | None = None,
        gpus: GpuGauges | None = None,
        wire: WireCounts | None = None,
        fronts: Callable[[], Sequence[FrontGauges]] = list,
        reloads: FileReloads | None = None,
        answers: StoreCounts | None = None,
        limiter: MeasuredLimiter | None = None,
        callers: CallerCounts | None = None,
        on_demand: MeasuredOnDemand | None = None,
        shadows: ShadowCounts | None = None,
        traffic_weights: Callable[[], Mapping[str, Mapping[int, float]]] = dict,
        model_metrics: ModelMetricsBoard | None = None,
        options: MetricsOptions | None = None,
    ) -> None:
        self._model_metrics = model_metrics
        self._models = models
        # The models at the last scrape, and those of them whose instances measure something.
        self._known: tuple[MeasuredModel, ...] = ()
        self._measuring: list[MeasuredModel] = []
        self._load_counts = load_counts
        self._server_version = server_version
        self._refusals = refusals or RefusalCounts()
        self._host = host
        self._gpus = gpus
        self._wire = wire
        self._fronts = fronts
        self._reloads = reloads
        self._answers = answers
        self._limiter = limiter
        self._callers = callers
        self._on_demand = on_demand
        self._shadows = shadows
        self._traffic_weights = traffic_weights
        self._of_models = ModelFamilies(options or MetricsOptions())
        self._process = ProcessCollector(registry=None)

    def collect(self) -> list[Metric]:
        """Every family, in a fixed order; those of models have no sample while there is no model."""
        return finish(self.collect_slices())

    def collect_slices(self) -> Slices[list[Metric]]:
        """As `collect`. The first slice is for the event loop: it reads state that only the loop may touch."""
        models = self._models()
        if models is not self._known:
            self._known, self._measuring = models, [model for model in models if model.measures]
        measured = {id(model): model.measure() for model in self._measuring}
        of_server = self._families_of_server()
        yield
        samples, families = yield from self._of_models.slices(models)
        if self._answers is not None:
            cached = [(sample.labels, sample.numbers) for sample in samples if sample.has_cache]
            families += cache_families(self._answers, cached)
        families += of_server
        families += yield from _load_families(self._load_counts())
        if self._host is not None:
            families += _host_families(self._host)
        if self._gpus is not None:
            families += gpu_families(self._gpus.read())
        yield
        families += measured_families(
            # vLLM's dashboards use `model_name` and `engine`, Triton's `model` and `version`.
            (
                {**sample.labels, "model_name": sample.model.name, "engine": str(position)},
                with_queue(measurements, 0 if position else sample.numbers.pending),
            )
            for sample in samples
            for position, measurements in enumerate(measured.get(id(sample.model), ()))
            if measurements
        )
        yield
        info = Metric("modelserver_build_info", "Version of the server; the value is always 1", "gauge")
        info.add_sample(info.name, {"version": self._server_version}, 1)
        families += [info, *self._process.collect()]
        if self._model_metrics is not None:
            _add_families_of_models(families, self._model_metrics.families())
        return families

    def _families_of_server(self) -> list[Metric]:
        """The metrics that are read from state of the event loop."""
        families: list[Metric] = []
        if self._limiter is not None:
            families += limiter_families(self._limiter)
        if self._callers is not None:
            families += self._callers.families()
        if self._on_demand is not None:
            families += on_demand_families(self._on_demand)
        if self._shadows is not None:
            families += self._shadows.families(self._traffic_weights)
        families.append(_refusal_family(self._refusals))
        if self._wire is not None:
            families += wire_families(self._wire)
        families += front_families(self._fronts())
        if self._reloads is not None:
            families += self._reloads.families()
        return families


def _add_families_of_models(families: list[Metric], of_models: Iterable[Metric]) -> None:
    """Add the metrics that models made: to the server's family of the same name, because scrapers reject a page
    with a name twice. If that family has another kind, the model's family is left out."""
    own = {exposed_name(family): family for family in families if has_samples(family)}
    for family in of_models:
        present = own.get(exposed_name(family))
        if present is None:
            families.append(family)
        elif present.type == family.type:
            present.samples.extend(family.samples)


def _load_families(counts: Mapping[str, LoadCounts]) -> Slices[list[Metric]]:
    loads = Metric("modelserver_model_loads", "Successful loads and reloads of the model since start", "counter")
    failures = Metric("modelserver_model_load_failures", "Failed loads and reloads of the model since start", "counter")
    for name, counter in sorted(counts.items()):
        loads.add_sample(f"{loads.name}_total", {"model": name}, counter.successes)
        failures.add_sample(f"{failures.name}_total", {"model": name}, counter.failures)
        yield
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
        # Triton's dashboards use them.
        ("nv_pinned_memory_pool_total_bytes", "Size of the pool of pinned memory: there is none", 0),
        ("nv_pinned_memory_pool_used_bytes", "Pinned memory in use of the pool, in bytes", 0),
    )
    families = []
    for name, text, value in values:
        metric = Metric(name, text, "gauge")
        metric.add_sample(name, {}, value)
        families.append(metric)
    return families
