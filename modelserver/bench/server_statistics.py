"""The server's counts during a measurement: differences of its statistics, broken down as in Triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelserver.bench.interface import Interface
from modelserver.client.control import ControlClient
from modelserver.errors import ServerError
from modelserver.telemetry.statistics_snapshot import DurationStat

_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_NONE = DurationStat()


@dataclass(frozen=True, slots=True)
class ModelCounts:
    """Cumulative counts of one model, or their difference over a measurement."""

    name: str
    version: str
    inference_count: int = 0
    execution_count: int = 0
    success: DurationStat = _NONE
    fail: DurationStat = _NONE
    queue: DurationStat = _NONE
    compute_input: DurationStat = _NONE
    compute_infer: DurationStat = _NONE
    compute_output: DurationStat = _NONE
    cache_hit: DurationStat = _NONE
    cache_miss: DurationStat = _NONE

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ModelCounts:
        """An entry of `model_stats`, whose integers may be strings."""
        stats = document.get("inference_stats", {})
        durations = {
            name: DurationStat(int(stats.get(name, {}).get("count", 0)), int(stats.get(name, {}).get("ns", 0)))
            for name in _DURATIONS
        }
        return cls(
            name=str(document.get("name", "")),
            version=str(document.get("version", "")),
            inference_count=int(document.get("inference_count", 0)),
            execution_count=int(document.get("execution_count", 0)),
            **durations,
        )

    def __sub__(self, other: ModelCounts) -> ModelCounts:
        durations = {name: getattr(self, name).since(getattr(other, name)) for name in _DURATIONS}
        return ModelCounts(
            self.name,
            self.version,
            self.inference_count - other.inference_count,
            self.execution_count - other.execution_count,
            **durations,
        )

    def mean_us(self, name: str) -> int:
        """The average time of successful requests in a part, in whole microseconds; 0 without requests."""
        duration: DurationStat = getattr(self, name)
        return int(duration.ns / self.success.count / 1000) if self.success.count else 0

    @property
    def overhead_us(self) -> int:
        """The time of the average request outside of all parts."""
        parts = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
        return max(0, self.mean_us("success") - sum(self.mean_us(part) for part in parts))


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """The measured model, and the steps if it is an ensemble."""

    model: ModelCounts
    steps: tuple[ModelCounts, ...] = ()

    def __sub__(self, other: ServerCounts) -> ServerCounts:
        before = {step.name: step for step in other.steps}
        steps = tuple(step - before.get(step.name, ModelCounts(step.name, step.version)) for step in self.steps)
        return ServerCounts(self.model - other.model, steps)


def read_counts(
    control: ControlClient, interface: Interface, composing: Sequence[tuple[str, str]]
) -> ServerCounts | None:
    """The counts so far; None for a server that keeps none."""
    try:
        model = _model_counts(control, interface.name, interface.version)
        steps = [_model_counts(control, name, version) for name, version in (*interface.composing, *composing)]
    except ServerError:
        return None
    return ServerCounts(model, tuple(steps))


def _model_counts(control: ControlClient, name: str, version: str) -> ModelCounts:
    """The counts of one version; by default the newest, because it answers."""
    rows = [ModelCounts.from_document(row) for row in control.statistics(name, version)]
    rows.sort(key=lambda row: int(row.version) if row.version.isdigit() else 0)
    return rows[-1] if rows else ModelCounts(name, version)
