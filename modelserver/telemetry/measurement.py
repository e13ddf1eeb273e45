"""Measurements by instances of themselves, and the metric families made from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client.core import Metric


@dataclass(frozen=True, slots=True)
class Measurement:
    """A metric of an instance as it is now: the server adds the labels of its model, and the instance's position.

    `kind` is "counter" (its name on the page gets `_total`), "gauge" or "histogram"; a histogram has a `value` that is
    the sum of the observations, and in `counts` their number between each of `bounds` and the one before; the last
    counts those above all bounds. `adds_queue`: a gauge of waiting requests; the requests in the model's queue are
    added, to the first instance's, as all instances share it.
    """

    name: str
    kind: str
    text: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    bounds: Sequence[float] = ()
    counts: Sequence[int] = ()
    adds_queue: bool = False


def with_queue(measurements: Sequence[Measurement], num_queued: int) -> Sequence[Measurement]:
    """The measurements with the requests in the model's queue, which an instance does not see."""
    if not num_queued:
        return measurements
    return [replace(each, value=each.value + num_queued) if each.adds_queue else each for each in measurements]


def measured_families(measured: Iterable[tuple[Mapping[str, str], Sequence[Measurement]]]) -> list[Metric]:
    """The families of all instances, each sample with its own labels, in order of first appearance."""
    families: dict[str, Metric] = {}
    for labels, measurements in measured:
        for measurement in measurements:
            family = families.get(measurement.name)
            if family is None:
                family = families[measurement.name] = Metric(measurement.name, measurement.text, measurement.kind)
            _add(family, {**labels, **measurement.labels}, measurement)
    return list(families.values())


def _add(family: Metric, labels: dict[str, str], measurement: Measurement) -> None:
    name = measurement.name
    if measurement.kind != "histogram":
        family.add_sample(f"{name}_total" if measurement.kind == "counter" else name, labels, measurement.value)
        return
    total = 0
    for bound, count in zip((*measurement.bounds, float("inf")), measurement.counts, strict=True):
        total += count
        limit = "+Inf" if bound == float("inf") else repr(float(bound))
        family.add_sample(f"{name}_bucket", {**labels, "le": limit}, total)
    family.add_sample(f"{name}_count", labels, total)
    family.add_sample(f"{name}_sum", labels, measurement.value)
