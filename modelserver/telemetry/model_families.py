"""The metric families of loaded model versions. A scrape renders a version again only if its numbers have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from prometheus_client.core import Metric

from modelserver.config.schema import ModelConfig
from modelserver.core.long_work import Slices
from modelserver.telemetry.exposition import JoinedBlocks, RenderedFamily, SampleBlock, sample_block
from modelserver.telemetry.histogram import FIRST_RESPONSE_MS, HistogramSnapshot
from modelserver.telemetry.load_page import BusyModel
from modelserver.telemetry.measurement import restart_family
from modelserver.telemetry.statistics import ModelStatistics
from modelserver.telemetry.statistics_snapshot import StatisticsSnapshot

# Versions whose lines are kept joined: a group is looked through, or joined again, within a slice.
_GROUP = 64


class MeasuredModel(BusyModel, Protocol):
    """The properties of a loaded model version that the metrics read."""

    @property
    def version(self) -> int: ...

    @property
    def statistics(self) -> ModelStatistics: ...

    @property
    def load_duration_s(self) -> float: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def namespace(self) -> str: ...


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Which optional families are made: `counter_latencies` and `histogram_latencies` of --metrics-config."""

    has_duration_counters: bool = True
    has_duration_histograms: bool = True


@dataclass(frozen=True, slots=True)
class ModelSample:
    """A version's numbers at one moment; `labels` are its own."""

    model: MeasuredModel
    labels: dict[str, str]
    numbers: StatisticsSnapshot

    @classmethod
    def take(cls, model: MeasuredModel) -> ModelSample:
        """The metrics of a loaded model."""
        return cls(model, _labels(model), model.statistics.snapshot())

    @property
    def has_cache(self) -> bool:
        """Whether the config enables the response cache."""
        cache = self.model.config.response_cache
        return cache is not None and cache.enable


@dataclass(frozen=True, slots=True)
class _Family:
    """A family with one value per model version."""

    name: str
    kind: str
    help: str
    value: Callable[[ModelSample], float]


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
        "modelserver_running_requests",
        "gauge",
        "Number of requests that are executing: of those in flight, the ones that no longer wait in the queue",
        lambda sample: max(0, sample.numbers.inflight - sample.numbers.pending),
    ),
    _Family(
        "nv_model_load_duration_secs",
        "gauge",
        "Seconds that loading the model took, warmup included",
        lambda sample: sample.model.load_duration_s,
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
    "Duration from request to first response in milliseconds",
    lambda numbers: numbers.first_response_histogram,
)
# The measured duration, name, help.
_SUMMARIES = (
    (
        "request",
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
    ),
    (
        "queue",
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
    ),
    (
        "compute_input",
        "nv_inference_compute_input_summary_us",
        "Summary of compute input duration in microseconds (does not include cached requests)",
    ),
    (
        "compute_infer",
        "nv_inference_compute_infer_summary_us",
        "Summary of compute inference duration in microseconds (does not include cached requests)",
    ),
    (
        "compute_output",
        "nv_inference_compute_output_summary_us",
        "Summary of compute output duration in microseconds (does not include cached requests)",
    ),
    (
        "cache_hit",
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit counts/durations per model, in microseconds.",
    ),
    (
        "cache_miss",
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss counts/durations per model, in microseconds.",
    ),
)
# Whether a model must have a cache for its summary, or must not.
_ONLY_WITH_CACHE = {"request": False, "cache_hit": True, "cache_miss": True}
_BATCH_ROWS = (
    "modelserver_batch_rows",
    "Rows of the executed batches",
    lambda numbers: numbers.batch_rows_histogram,
)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """The lines of one version by family, valid as long as its statistics have this mark."""

    mark: tuple[object, ...]
    sample: ModelSample
    blocks: Mapping[str, SampleBlock]


@dataclass(frozen=True, slots=True)
class _Group:
    """The lines of some versions, joined by family: valid as long as those of each version are."""

    rendered: tuple[_Rendered, ...]
    blocks: Mapping[str, JoinedBlocks]

    @classmethod
    def join(cls, rendered: Sequence[_Rendered], names: Sequence[str]) -> _Group:
        """The lines of these versions in the families of those names."""
        blocks = {name: [each.blocks[name] for each in rendered if name in each.blocks] for name in names}
        return cls(tuple(rendered), {name: JoinedBlocks(found) for name, found in blocks.items() if found})


class ModelFamilies:
    """The families of models, in a fixed order. The lines of a version are kept until its numbers change."""

    def __init__(self, options: MetricsOptions) -> None:
        self._options = options
        self._names = tuple(head.name for head in _model_families((), options))
        self._rendered: WeakKeyDictionary[ModelStatistics, _Rendered] = WeakKeyDictionary()
        # The models at the last scrape, and their groups. Scrapes in several threads each replace what is out of date.
        self._known: tuple[Sequence[MeasuredModel], list[_Group | None]] = ((), [])

    def slices(self, models: Sequence[MeasuredModel]) -> Slices[tuple[list[ModelSample], list[Metric]]]:
        """The numbers of each version, and the families with them; a family without a sample is left out.

        `models` is the same object as at the scrape before if they are the same models.
        """
        if models is not self._known[0]:
            self._known = models, [None] * -(-len(models) // _GROUP)
        groups = self._known[1]
        found: list[_Group] = []
        for position, group in enumerate(groups):
            of_group = models[position * _GROUP : (position + 1) * _GROUP]
            yield
            if group is None or any(
                each.mark != model.statistics.mark() for each, model in zip(group.rendered, of_group, strict=True)
            ):
                rendered = []
                for model in of_group:
                    statistics = model.statistics
                    kept = self._rendered.get(statistics)
                    if kept is None or kept.mark != statistics.mark():
                        kept = self._rendered[statistics] = self._render(model)
                        yield
                    rendered.append(kept)
                group = groups[position] = _Group.join(rendered, self._names)
            found.append(group)
        families: list[Metric] = []
        for head in _model_families((), self._options):
            blocks = [group.blocks[head.name] for group in found if head.name in group.blocks]
            if blocks:
                families.append(RenderedFamily(head, blocks))
        yield
        return [each.sample for group in found for each in group.rendered], families

    def _render(self, model: MeasuredModel) -> _Rendered:
        """The mark is read first, so that the next scrape sees changes during this one."""
        mark = model.statistics.mark()
        sample = ModelSample.take(model)
        families = _model_families([sample], self._options)
        return _Rendered(mark, sample, {family.name: sample_block(family) for family in families if family.samples})


def _model_families(samples: Sequence[ModelSample], options: MetricsOptions) -> Iterator[Metric]:
    """Every family of models, in a fixed order, with one or more samples for each version."""
    make = _family_maker(samples)
    yield from map(make, _COUNTS)
    yield _failures(samples)
    yield restart_family((sample.labels, sample.model.statistics.process_restarts) for sample in samples)
    if options.has_duration_counters:
        yield from map(make, _DURATIONS)
    for name, text, pick in (*_HISTOGRAMS, _BATCH_ROWS) if options.has_duration_histograms else (_BATCH_ROWS,):
        yield _histogram(name, text, samples, pick)
    if options.has_duration_histograms:
        name, text, pick = _FIRST_RESPONSE
        yield _histogram(name, text, samples, pick)
    yield from _summaries(samples)


def _summaries(samples: Sequence[ModelSample]) -> Iterator[Metric]:
    """Triton's: of models with a cache, look-ups in place of whole requests."""
    for measured, name, text in _SUMMARIES:
        family = Metric(name, text, "summary")
        for sample in samples:
            if (
                measured in sample.numbers.summaries
                and _ONLY_WITH_CACHE.get(measured, sample.has_cache) is sample.has_cache
            ):
                snapshot = sample.numbers.summaries[measured]
                family.add_sample(f"{name}_count", sample.labels, snapshot.count)
                family.add_sample(f"{name}_sum", sample.labels, snapshot.sum_us)
                for quantile, value_us in snapshot.quantiles_us:
                    family.add_sample(name, {**sample.labels, "quantile": f"{quantile:g}"}, value_us)
        yield family


def _labels(model: MeasuredModel) -> dict[str, str]:
    """Name, version, namespace if there are any, and the `metric_tags` of the config, marked by an underscore."""
    tags = {f"_{key}": value for key, value in model.config.metric_tags.items()}
    namespace = {"namespace": model.namespace} if model.namespace else {}
    return {"model": model.name, **namespace, "version": str(model.version), **tags}


def _family_maker(samples: Sequence[ModelSample]) -> Callable[[_Family], Metric]:
    def make(family: _Family) -> Metric:
        metric = Metric(family.name, family.help, family.kind)
        for sample in samples:
            metric.add_sample(family.name, sample.labels, family.value(sample))
        return metric

    return make


def _failures(samples: Sequence[ModelSample]) -> Metric:
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
    name: str, text: str, samples: Sequence[ModelSample], pick: Callable[[StatisticsSnapshot], HistogramSnapshot]
) -> Metric:
    metric = Metric(name, text, "histogram")
    for sample in samples:
        pick(sample.numbers).add_to(metric, sample.labels)
    return metric
