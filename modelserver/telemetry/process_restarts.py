"""Restarts of instances' processes, and their reasons."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric


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

    def expect(self) -> None:
        """Record that an instance has a process, so restarts are possible."""
        with self._lock:
            self._counts = self._counts or dict.fromkeys(RestartReason, 0)

    def record(self, reason: RestartReason) -> None:
        """Record the start of the next process."""
        with self._lock:
            self._counts[reason] = self._counts.get(reason, 0) + 1

    def snapshot(self) -> dict[RestartReason, int]:
        """The counts by reason; empty if no instance has a process."""
        with self._lock:
            return dict(self._counts)


def restart_family(restarts: Iterable[tuple[Mapping[str, str], ProcessRestarts]]) -> Metric:
    """The family of models by their labels; those without processes have no sample."""
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
