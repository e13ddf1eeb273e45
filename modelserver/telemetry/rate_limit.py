"""The metric families of the rate limiter: its resources, and the waiting instances. Triton has no such metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import Metric


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """A resource at one moment; `device` None is global."""

    name: str
    device: int | None
    capacity: int
    used: int


class MeasuredLimiter(Protocol):
    """The numbers of a rate limiter."""

    @property
    def num_waiting(self) -> int: ...

    def uses(self) -> Sequence[ResourceUse]: ...


def limiter_families(limiter: MeasuredLimiter) -> list[Metric]:
    """The families by resource and device; the device of a global resource is empty."""
    capacity = Metric("modelserver_resource_capacity", "Units of a resource that instances may hold", "gauge")
    used = Metric("modelserver_resource_used", "Units of a resource that executing instances hold", "gauge")
    for use in limiter.uses():
        labels = {"resource": use.name, "device": "" if use.device is None else str(use.device)}
        capacity.add_sample(capacity.name, labels, use.capacity)
        used.add_sample(used.name, labels, use.used)
    waiting = Metric("modelserver_resource_waiting_instances", "Instances that wait for resources", "gauge")
    waiting.add_sample(waiting.name, {}, limiter.num_waiting)
    return [capacity, used, waiting]
