"""Outcomes of request copies that shadow versions have received, and versions' weights."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping

from prometheus_client.core import Metric


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
