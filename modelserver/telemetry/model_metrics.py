"""Metrics that models make themselves: families by name, and in each a number or a histogram by its labels."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from prometheus_client.core import Metric

from modelserver.errors import AlreadyExistsError, InternalError, InvalidArgumentError, NotFoundError
from modelserver.telemetry.histogram import HistogramSnapshot

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_KINDS = ("counter", "gauge", "histogram")


@dataclass(slots=True, eq=False)
class _Series:
    """One metric. `num_handles` counts its holders."""

    labels: dict[str, str]
    bounds: tuple[float, ...] = ()
    num_handles: int = 0
    value: float = 0.0
    counts: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _MetricFamily:
    name: str
    text: str
    kind: str
    num_handles: int = 0
    series: dict[tuple[tuple[str, str], ...], _Series] = field(default_factory=dict)


_Handle = _MetricFamily | tuple[_MetricFamily, _Series]


class ModelMetricsBoard:
    """All metrics of models. Making an equal family or metric again returns the same one; the last holder removes it.

    Owners change metrics on the event loop thread; `_lock` guards them against a scrape on another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _MetricFamily] = {}
        self._handles: dict[tuple[object, int], _Handle] = {}
        self._last_handle = 0
        self._topics: Mapping[str, Callable[[object, Mapping[str, Any]], Any]] = {
            "metric_family": self._make_family,
            "metric_new": self._make_series,
            "metric_add": self._add,
            "metric_set": self._set,
            "metric_observe": self._observe,
            "metric_value": self._value,
            "metric_drop": self._drop,
        }

    def ask(self, owner: object, topic: str, arguments: Mapping[str, Any]) -> Any:
        """Perform a model's request. Raises ServerError, also for a handle of another owner."""
        action = self._topics.get(topic)
        if action is None:
            raise InvalidArgumentError(f"unknown metrics call '{topic}'")
        with self._lock:
            return action(owner, arguments)

    def forget(self, owner: object) -> None:
        """Drop all handles of an owner that has ended."""
        with self._lock:
            for key in [key for key in self._handles if key[0] is owner]:
                self._release(self._handles.pop(key))

    def families(self) -> list[Metric]:
        """All of them as Prometheus families, by name."""
        with self._lock:
            return [_prometheus(family) for _, family in sorted(self._families.items())]

    def _make_family(self, owner: object, arguments: Mapping[str, Any]) -> int:
        name, text, kind = (str(arguments[key]) for key in ("name", "description", "kind"))
        if not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"'{name}' is not a valid metric name: use letters, digits, '_' and ':'")
        if kind not in _KINDS:
            raise InvalidArgumentError(f"metric '{name}': expected one of {', '.join(_KINDS)}, got '{kind}'")
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = _MetricFamily(name, text, kind)
        elif family.kind != kind:
            raise AlreadyExistsError(f"metric '{name}' is there already as a {family.kind}, and cannot be a {kind} too")
        family.num_handles += 1
        return self._hand_out(owner, family)

    def _make_series(self, owner: object, arguments: Mapping[str, Any]) -> int:
        family = self._handles.get((owner, int(arguments["family"])))
        if not isinstance(family, _MetricFamily):
            raise NotFoundError("the MetricFamily of this metric is gone")
        labels = dict(arguments["labels"])
        for label in labels:
            if not _LABEL.fullmatch(label) or label == "le":
                raise InvalidArgumentError(f"metric '{family.name}': '{label}' is not a valid label name")
        bounds = tuple(arguments["buckets"])
        if any(later <= earlier for earlier, later in pairwise(bounds)):
            raise InvalidArgumentError(f"metric '{family.name}': buckets must ascend, got {list(bounds)}")
        key = tuple(sorted(labels.items()))
        series = family.series.get(key)
        if series is None:
            series = family.series[key] = _Series(labels, bounds, counts=[0] * (len(bounds) + 1))
        elif series.bounds != bounds:
            raise AlreadyExistsError(
                f"metric '{family.name}' {labels} is there already with buckets {list(series.bounds)}"
            )
        series.num_handles += 1
        return self._hand_out(owner, (family, series))

    def _add(self, owner: object, arguments: Mapping[str, Any]) -> None:
        self._series(owner, arguments).value += float(arguments["value"])

    def _set(self, owner: object, arguments: Mapping[str, Any]) -> None:
        self._series(owner, arguments).value = float(arguments["value"])

    def _observe(self, owner: object, arguments: Mapping[str, Any]) -> None:
        series = self._series(owner, arguments)
        value = float(arguments["value"])
        series.value += value
        series.counts[bisect_left(series.bounds, value)] += 1

    def _value(self, owner: object, arguments: Mapping[str, Any]) -> float:
        return self._series(owner, arguments).value

    def _drop(self, owner: object, arguments: Mapping[str, Any]) -> None:
        handle = self._handles.pop((owner, int(arguments["handle"])), None)
        if handle is not None:
            self._release(handle)

    def _hand_out(self, owner: object, handle: _Handle) -> int:
        self._last_handle += 1
        self._handles[owner, self._last_handle] = handle
        return self._last_handle

    def _series(self, owner: object, arguments: Mapping[str, Any]) -> _Series:
        handle = self._handles.get((owner, int(arguments["handle"])))
        if not isinstance(handle, tuple):
            raise InternalError("this metric was dropped")
        return handle[1]

    def _release(self, handle: _Handle) -> None:
        if isinstance(handle, tuple):
            family, series = handle
            series.num_handles -= 1
            if not series.num_handles:
                del family.series[tuple(sorted(series.labels.items()))]
        else:
            family = handle
            family.num_handles -= 1
        if not family.num_handles and not family.series:
            self._families.pop(family.name, None)


def _prometheus(family: _MetricFamily) -> Metric:
    metric = Metric(family.name, family.text, family.kind)
    for series in family.series.values():
        if family.kind == "histogram":
            HistogramSnapshot(tuple(series.bounds), tuple(series.counts), series.value).add_to(metric, series.labels)
        else:
            metric.add_sample(family.name, series.labels, series.value)
    return metric
