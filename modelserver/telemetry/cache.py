"""The metric families of the response cache, with Triton's names: for the whole cache, and for each model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from modelserver.cache.store import StoreCounts
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
