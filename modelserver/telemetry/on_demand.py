"""Metrics of models on demand: loaded models, loads and evictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client.core import Metric


class MeasuredLoaded(Protocol):
    @property
    def key(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...


class DemandNumbers(Protocol):
    @property
    def loads(self) -> Mapping[str, int]: ...

    @property
    def evictions(self) -> Mapping[tuple[str, str], int]: ...

    @property
    def budget_bytes(self) -> int: ...


class MeasuredOnDemand(Protocol):
    """The numbers of a repository's on_demand. Event loop thread."""

    @property
    def is_active(self) -> bool: ...

    def loaded_models(self) -> Iterable[MeasuredLoaded]: ...

    def counts(self) -> DemandNumbers: ...


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
    for each in on_demand.loaded_models():
        resident.add_sample(resident.name, {"model": each.key}, each.num_bytes)
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
