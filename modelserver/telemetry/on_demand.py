"""Metrics of models on demand: loaded models, loads and evictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import Metric


@dataclass(frozen=True, slots=True)
class DemandCounts:
    """Since the server started: loads by requests, evictions by key and reason, and loads in progress.

    `loaded_bytes` is the memory of each model on demand that is loaded.
    """

    loads: Mapping[str, int]
    evictions: Mapping[tuple[str, str], int]
    loaded_bytes: Mapping[str, int]
    num_loading: int
    budget_bytes: int


class MeasuredOnDemand(Protocol):
    """The numbers of a repository's on_demand. Event loop thread."""

    @property
    def is_active(self) -> bool: ...

    def counts(self) -> DemandCounts: ...


def on_demand_families(on_demand: MeasuredOnDemand) -> list[Metric]:
    """The families; empty while no model is on demand."""
    if not on_demand.is_active:
        return []
    counts = on_demand.counts()
    resident = Metric(
        "modelserver_on_demand_resident_bytes",
        "Bytes that models on demand take, those that are in memory: measured, or as their config says",
        "gauge",
    )
    for key, num_bytes in counts.loaded_bytes.items():
        resident.add_sample(resident.name, {"model": key}, num_bytes)
    budget = Metric(
        "modelserver_on_demand_budget_bytes", "Bytes that models on demand may take together; 0: no limit", "gauge"
    )
    budget.add_sample(budget.name, {}, counts.budget_bytes)
    loads = Metric("modelserver_on_demand_loads", "Loads that requests for a model have caused", "counter")
    for key, count in sorted(counts.loads.items()):
        loads.add_sample(f"{loads.name}_total", {"model": key}, count)
    evictions = Metric(
        "modelserver_on_demand_evictions", "Models that left memory, because they were idle or for others", "counter"
    )
    for (key, reason), count in sorted(counts.evictions.items()):
        evictions.add_sample(f"{evictions.name}_total", {"model": key, "reason": reason}, count)
    return [resident, budget, loads, evictions]
