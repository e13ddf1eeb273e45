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
    LoadCounts,
)
from modelserver.telemetry.exposition import RenderedFamily, SampleBlock, exposed_name, has_samples, sample_block
from modelserver.telemetry.load_page import LoadPage
from modelserver.telemetry.measurement import measured_families, with_queue
from modelserver.telemetry.model_families import MeasuredModel, MetricsOptions, ModelFamilies
from modelserver.telemetry.model_metrics import ModelMetricsBoard
from modelserver.telemetry.statistics_snapshot import StatisticsSnapshot


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


# Makes families from what it counts or reads.
FamilySource = Callable[[], Iterable[Metric]]


class ServerMetrics:
    """Makes all families on request, in a fixed order.

    `models` is called on the event loop thread, and returns the same tuple until a model is loaded or unloaded;
    `load_counts` is called from any thread. `on_loop` are the sources that read state of the event loop, `off_loop`
    those of the machine, which take longer.
    """

    def __init__(
        self,
        models: Callable[[], tuple[MeasuredModel, ...]],
        load_counts: Callable[[], Mapping[str, LoadCounts]],
        *,
        server_version: str,
        on_loop: Sequence[FamilySource] = (),
        off_loop: Sequence[FamilySource] = (),
        answers: StoreCounts | None = None,
        model_metrics: ModelMetricsBoard | None = None,
        options: MetricsOptions | None = None,
    ) -> None:
        self._model_metrics = model_metrics
        self._models = models
        # The models at the last scrape, and those of them whose instances measure something.
        self._known: tuple[MeasuredModel, ...] = ()
        self._measuring: list[MeasuredModel] = []
        self._load_counts = load_counts
        # The counts of loads at the last scrape, and their lines.
        self._loads: tuple[Mapping[str, LoadCounts], list[SampleBlock]] = ({}, [])
        self._server_version = server_version
        self._on_loop = on_loop
        self._off_loop = off_loop
        self._answers = answers
        self._of_models = ModelFamilies(options or MetricsOptions())
        self._process = ProcessCollector(registry=None)
        self.load = LoadPage(models)

    def collect(self) -> list[Metric]:
        """Every family, in a fixed order; those of models have no sample while there is no model."""
        return finish(self.collect_slices())

    def collect_slices(self) -> Slices[list[Metric]]:
        """As `collect`. The first slice is for the event loop: it reads state that only the loop may touch."""
        models = self._models()
        if models is not self._known:
            self._known, self._measuring = models, [model for model in models if model.measures]
        measured = {id(model): model.measure() for model in self._measuring}
        of_server = [family for source in self._on_loop for family in source()]
        yield
        samples, families = yield from self._of_models.slices(models)
        if self._answers is not None:
            cached = [(sample.labels, sample.numbers) for sample in samples if sample.has_cache]
            families += cache_families(self._answers, cached)
        families += of_server
        families += yield from self._load_families()
        families += [family for source in self._off_loop for family in source()]
        yield
        samples = [sample for sample in samples if id(sample.model) in measured] if measured else []
        families += measured_families(
            # vLLM's dashboards use `model_name` and `engine`, Triton's `model` and `version`.
            (
                {**sample.labels, "model_name": sample.model.name, "engine": str(position)},
                with_queue(measurements, 0 if position else sample.numbers.pending),
            )
            for sample in samples
            for position, measurements in enumerate(measured[id(sample.model)])
            if measurements
        )
        yield
        info = Metric("modelserver_build_info", "Version of the server; the value is always 1", "gauge")
        info.add_sample(info.name, {"version": self._server_version}, 1)
        families += [info, *self._process.collect()]
        if self._model_metrics is not None:
            add_families_of_models(families, self._model_metrics.families())
        return families

    def _load_families(self) -> Slices[list[Metric]]:
        counts = self._load_counts()
        loads = Metric("modelserver_model_loads", "Successful loads and reloads of the model since start", "counter")
        failures = Metric(
            "modelserver_model_load_failures", "Failed loads and reloads of the model since start", "counter"
        )
        known, blocks = self._loads
        if counts != known:
            for name, counter in sorted(counts.items()):
                loads.add_sample(f"{loads.name}_total", {"model": name}, counter.successes)
                failures.add_sample(f"{failures.name}_total", {"model": name}, counter.failures)
                yield
            blocks = [sample_block(family) for family in (loads, failures)] if counts else []
            self._loads = counts, blocks
        return [RenderedFamily(head, [block]) for head, block in zip((loads, failures), blocks, strict=False)]


def add_families_of_models(families: list[Metric], of_models: Iterable[Metric]) -> None:
    """Add the metrics that models made: to the server's family of the same name, because scrapers reject a page
    with a name twice. If that family has another kind, the model's family is left out."""
    own = {exposed_name(family): family for family in families if has_samples(family)}
    for family in of_models:
        present = own.get(exposed_name(family))
        if present is None:
            families.append(family)
        elif present.type == family.type:
            present.samples.extend(family.samples)
