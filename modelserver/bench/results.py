"""The results of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from modelserver.bench.fleet import Harvest
from modelserver.bench.interface import Interface
from modelserver.bench.options import BenchOptions, Mode
from modelserver.bench.server_statistics import GpuMetrics
from modelserver.bench.window import Window

# More than this share of late requests, and the rate was not what it says.
MAX_DELAYED = 0.1
# A load process that uses more of its CPU than this measures itself.
MAX_BUSY = 0.92


@dataclass(slots=True)
class LevelResult:
    """One level of load: all its windows, and the one that is reported.

    `window` combines the last stable windows, else all windows. `failures` has those between windows too.
    """

    value: float
    windows: list[Window]
    window: Window
    is_stable: bool
    failures: Counter[str]
    num_unanswered: int = 0
    gpu: GpuMetrics = field(default_factory=GpuMetrics)
    # The records, where they are to be exported.
    harvest: Harvest | None = None

    @property
    def num_failures(self) -> int:
        return self.failures.total() + self.num_unanswered

    @property
    def is_delayed(self) -> bool:
        return self.window.num_delayed > MAX_DELAYED * max(self.window.num_requests, 1)

    @property
    def is_client_busy(self) -> bool:
        return self.window.busiest > MAX_BUSY


@dataclass(slots=True)
class Results:
    """A whole run."""

    options: BenchOptions
    interface: Interface
    num_workers: int
    levels: list[LevelResult] = field(default_factory=list)

    @property
    def mode(self) -> Mode:
        return self.options.load.mode

    @property
    def num_failures(self) -> int:
        return sum(level.num_failures for level in self.levels)

    @property
    def is_good(self) -> bool:
        """Something was measured, and nothing failed."""
        return bool(self.levels) and not self.num_failures and all(level.window.num_requests for level in self.levels)
