"""Counts that the server keeps beside those of its models: refusals, loads, callers, shadow requests,
models on demand, and resources of the rate limiter."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import Metric

from modelserver.errors import ErrorCode


@dataclass(frozen=True, slots=True)
class LoadCounts:
    """The outcomes of one model's loads since the server started; the duration is that of the last load."""

    successes: int = 0
    failures: int = 0
    last_duration_s: float = 0.0


class RefusalReason(enum.Enum):
    """Why; the values are the `reason` labels of the metric."""

    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    UNAVAILABLE = "UNAVAILABLE"  # the model or version is known and not ready, or the server is shutting down
    INVALID = "INVALID"  # the request does not fit the model's config
    OVERLOADED = "OVERLOADED"  # the caller's quota is used up
    OTHER = "OTHER"


_REASONS = {
    ErrorCode.NOT_FOUND: RefusalReason.UNKNOWN_MODEL,
    ErrorCode.UNAVAILABLE: RefusalReason.UNAVAILABLE,
    ErrorCode.OVERLOADED: RefusalReason.OVERLOADED,
    ErrorCode.INVALID_ARGUMENT: RefusalReason.INVALID,
    ErrorCode.PAYLOAD_TOO_LARGE: RefusalReason.INVALID,
}


class RefusalCounts:
    """Counts since the start of the server. Event loop thread only."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(RefusalReason, 0)

    def record(self, code: ErrorCode) -> None:
        """Count a request that was refused with an error of this code."""
        self._counts[_REASONS.get(code, RefusalReason.OTHER)] += 1

    def snapshot(self) -> Mapping[RefusalReason, int]:
        return dict(self._counts)

    def families(self) -> list[Metric]:
        """The requests that were refused, by reason."""
        metric = Metric(
            "modelserver_requests_refused",
            "Inference requests that no model accepted: UNKNOWN_MODEL, UNAVAILABLE (not ready, stopping), INVALID, "
            "OTHER",
            "counter",
        )
        for reason, count in self._counts.items():
            metric.add_sample(f"{metric.name}_total", {"reason": reason.value}, count)
        return [metric]


# How many callers are counted separately; the number of addresses and headers is unbounded.
_MAX_NAMES = 256
_OTHERS = "(others)"


class CallerCounts:
    """Requests by caller, and by `admitted` or the quota that refused them; tokens by caller. Event loop only."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._names: set[str] = set()

    def record(self, caller: str, result: str) -> None:
        self._requests[self._name(caller), result] += 1

    def record_tokens(self, caller: str, number: int) -> None:
        self._tokens[self._name(caller)] += number

    def families(self) -> list[Metric]:
        requests = Metric(
            "modelserver_caller_requests",
            "Inference requests by caller: admitted, or refused by a quota (requests, tokens, concurrent)",
            "counter",
        )
        for (caller, result), count in sorted(self._requests.items()):
            requests.add_sample(f"{requests.name}_total", {"caller": caller, "result": result}, count)
        tokens = Metric("modelserver_caller_tokens", "Tokens that language models read and wrote, by caller", "counter")
        for caller, count in sorted(self._tokens.items()):
            tokens.add_sample(f"{tokens.name}_total", {"caller": caller}, count)
        return [requests, tokens]

    def _name(self, caller: str) -> str:
        if caller not in self._names:
            if len(self._names) >= _MAX_NAMES:
                return _OTHERS
            self._names.add(caller)
        return caller


class ShadowResult(enum.Enum):
    """The values are the `result` labels of the metric."""

    EQUAL = "equal"
    DIFFERENT = "different"
    FAILED = "failed"  # in the shadow only
    UNCOMPARED = "uncompared"  # answered, but without an answer to compare with
    SKIPPED = "skipped"  # the limit of copies in flight was reached, or the queue was full


class ShadowCounts:
    """By model, version and result. Event loop thread only."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int, ShadowResult]] = Counter()

    def record(self, name: str, version: int, result: ShadowResult) -> None:
        self._counts[name, version, result] += 1

    def of(self, name: str) -> dict[str, dict[str, int]]:
        """The counts of one model by version and result."""
        found: dict[str, dict[str, int]] = {}
        for (model, version, result), count in sorted(self._counts.items(), key=lambda item: item[0][:2]):
            if model == name:
                found.setdefault(str(version), {})[result.value] = count
        return found

    def forget(self, name: str) -> None:
        """Reset the counts of a model when its traffic has changed: they would mix different comparisons."""
        for key in [key for key in self._counts if key[0] == name]:
            del self._counts[key]

    def families(self, weights: Callable[[], Mapping[str, Mapping[int, float]]]) -> list[Metric]:
        shadows = Metric(
            "modelserver_shadow_requests",
            "Copies of requests by version and what became of them: equal, different, failed, uncompared, skipped",
            "counter",
        )
        for (name, version, result), count in sorted(self._counts.items(), key=lambda item: str(item[0])):
            labels = {"model": name, "version": str(version), "result": result.value}
            shadows.add_sample(f"{shadows.name}_total", labels, count)
        weight = Metric("modelserver_traffic_weight", "Weights of versions that share a model's requests", "gauge")
        for name, by_version in sorted(weights().items()):
            for version, number in sorted(by_version.items()):
                weight.add_sample(weight.name, {"model": name, "version": str(version)}, number)
        return [shadows, weight]


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

    def families(self) -> list[Metric]:
        resident = Metric(
            "modelserver_on_demand_resident_bytes",
            "Bytes that models on demand take, those that are in memory: measured, or as their config says",
            "gauge",
        )
        for key, num_bytes in self.loaded_bytes.items():
            resident.add_sample(resident.name, {"model": key}, num_bytes)
        budget = Metric(
            "modelserver_on_demand_budget_bytes", "Bytes that models on demand may take together; 0: no limit", "gauge"
        )
        budget.add_sample(budget.name, {}, self.budget_bytes)
        loads = Metric("modelserver_on_demand_loads", "Loads that requests for a model have caused", "counter")
        for key, count in sorted(self.loads.items()):
            loads.add_sample(f"{loads.name}_total", {"model": key}, count)
        evictions = Metric(
            "modelserver_on_demand_evictions",
            "Models that left memory, because they were idle or for others",
            "counter",
        )
        for (key, reason), count in sorted(self.evictions.items()):
            evictions.add_sample(f"{evictions.name}_total", {"model": key, "reason": reason}, count)
        return [resident, budget, loads, evictions]


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """A resource at one moment; `device` None is global."""

    name: str
    device: int | None
    capacity: int
    used: int


def limiter_families(uses: Sequence[ResourceUse], num_waiting: int) -> list[Metric]:
    """The families by resource and device; the device of a global resource is empty."""
    capacity = Metric("modelserver_resource_capacity", "Units of a resource that instances may hold", "gauge")
    used = Metric("modelserver_resource_used", "Units of a resource that executing instances hold", "gauge")
    for use in uses:
        labels = {"resource": use.name, "device": "" if use.device is None else str(use.device)}
        capacity.add_sample(capacity.name, labels, use.capacity)
        used.add_sample(used.name, labels, use.used)
    waiting = Metric("modelserver_resource_waiting_instances", "Instances that wait for resources", "gauge")
    waiting.add_sample(waiting.name, {}, num_waiting)
    return [capacity, used, waiting]
