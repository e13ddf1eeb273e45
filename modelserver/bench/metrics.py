"""The server's GPU metrics during a measurement, gathered as perf_analyzer gathers them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from modelserver.client.address import Address
from modelserver.client.control import TIMEOUT_S
from modelserver.client.heads import HttpRequestHead
from modelserver.client.http_lane import HttpLane
from modelserver.client.lane import Questions
from modelserver.errors import ServerError, UnavailableError

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
