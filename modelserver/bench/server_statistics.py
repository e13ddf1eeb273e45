"""The server's counts during a measurement: differences of its statistics, broken down as in Triton; and the
metrics of its GPUs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modelserver.bench.interface import Interface
from modelserver.client.address import Address
from modelserver.client.control import TIMEOUT_S, ControlClient
from modelserver.client.heads import HttpRequestHead
from modelserver.client.http_lane import HttpLane
from modelserver.client.lane import Questions
from modelserver.errors import ServerError, UnavailableError
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


# The server's GPU metrics during a measurement, gathered as perf_analyzer gathers them.

_SAMPLE = re.compile(r'^(nv_gpu_\w+)\{[^}]*gpu_uuid="([^"]*)"[^}]*\}\s+(\S+)', re.MULTILINE)
UTILIZATION, POWER = "nv_gpu_utilization", "nv_gpu_power_usage"
MEMORY_USED, MEMORY_TOTAL = "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"
# Metric -> GPU -> value.
Sample = dict[str, dict[str, float]]


def read_sample(text: str) -> Sample:
    """The GPU metrics of one scrape."""
    sample: Sample = {}
    for name, gpu, value in _SAMPLE.findall(text):
        sample.setdefault(name, {})[gpu] = float(value)
    return sample


@dataclass(frozen=True, slots=True)
class GpuMetrics:
    """By GPU: utilization and power are averages, memory in use is the largest value."""

    utilization: Mapping[str, float] = field(default_factory=dict)
    power_watts: Mapping[str, float] = field(default_factory=dict)
    max_memory_bytes: Mapping[str, float] = field(default_factory=dict)
    total_memory_bytes: Mapping[str, float] = field(default_factory=dict)


def combine(samples: Iterable[Sample]) -> GpuMetrics:
    """The metrics of a measurement from its scrapes."""
    series: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        for name, values in sample.items():
            for gpu, value in values.items():
                series.setdefault(name, {}).setdefault(gpu, []).append(value)

    def mean(name: str) -> dict[str, float]:
        return {gpu: sum(values) / len(values) for gpu, values in series.get(name, {}).items()}

    return GpuMetrics(
        mean(UTILIZATION),
        mean(POWER),
        {gpu: max(values) for gpu, values in series.get(MEMORY_USED, {}).items()},
        {gpu: values[0] for gpu, values in series.get(MEMORY_TOTAL, {}).items()},
    )


class Scraper:
    """Scrapes the metrics periodically between `start` and `stop`."""

    def __init__(self, address: Address, path: str, interval_s: float) -> None:
        self._request = HttpRequestHead(address, "GET", path).encode(0)
        self._address = address
        self._interval_s = interval_s
        self._questions = Questions()
        self._lane = HttpLane(address, self._questions)
        self._task: asyncio.Task[None] | None = None
        self._samples: list[Sample] = []

    async def start(self) -> None:
        """Raises UnavailableError when the metrics cannot be read."""
        try:
            await self._lane.connect()
            await self._scrape()
        except ServerError as error:
            raise UnavailableError(f"cannot collect metrics (--metrics-url says where they are): {error}") from None
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lane.close()

    def take(self) -> list[Sample]:
        """The scrapes since the last call."""
        taken, self._samples = self._samples, []
        return taken

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._scrape()
            except ServerError:
                # A busy server may miss a scrape; the existing ones are averaged.
                continue

    async def _scrape(self) -> None:
        answer = await self._questions.ask(self._lane, self._request, TIMEOUT_S)
        self._samples.append(read_sample(answer.decode(errors="replace")))
