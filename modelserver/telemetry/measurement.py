"""Measurements by instances of themselves, and the metric families made from them."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from prometheus_client.core import Metric  # not at the top: workers measure too, and make no pages

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


class RestartReason(enum.Enum):
    """Why the previous process ended; the values are the `reason` labels of the metric."""

    EXITED = "exited"
    KILLED = "killed"  # by a signal: out of memory, a crash of native code, an operator
    HUNG = "hung"  # a batch exceeded its time limit, so we killed the process
    NOT_STARTED = "not_started"  # a replacement process that failed to start


class ProcessRestarts:
    """The restarts of all instances of a loaded version. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts
        self._counts: dict[RestartReason, int] = {}
        self.revision = 0  # grows with every change of the counts

    def expect(self) -> None:
        """Record that an instance has a process, so restarts are possible."""
        with self._lock:
            self._counts = self._counts or dict.fromkeys(RestartReason, 0)
            self.revision += 1

    def record(self, reason: RestartReason) -> None:
        """Record the start of the next process."""
        with self._lock:
            self._counts[reason] = self._counts.get(reason, 0) + 1
            self.revision += 1

    def snapshot(self) -> dict[RestartReason, int]:
        """The counts by reason; empty if no instance has a process."""
        with self._lock:
            return dict(self._counts)


def restart_family(restarts: Iterable[tuple[Mapping[str, str], ProcessRestarts]]) -> Metric:
    """The family of models by their labels; those without processes have no sample."""
    from prometheus_client.core import Metric

    metric = Metric(
        "modelserver_model_process_restarts",
        "How often processes of the model's instances were started again, by what ended the ones before: "
        "exited, killed (by a signal), hung, not_started",
        "counter",
    )
    for labels, counts in restarts:
        for reason, count in counts.snapshot().items():
            metric.add_sample(f"{metric.name}_total", {**labels, "reason": reason.value}, count)
    return metric
