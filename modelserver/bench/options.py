"""The checked options of a run of the bench."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from modelserver.bench.encode import Parameter
from modelserver.bench.input_data import DataOptions
from modelserver.bench.search import LoadRange
from modelserver.bench.window import Stability
from modelserver.bench.work import Sequences
from modelserver.client.address import Address


class Mode(StrEnum):
    """The quantity that varies from level to level; the words are those of perf_analyzer's export."""

    CONCURRENCY = "concurrency"
    REQUEST_RATE = "request_rate"
    INTERVALS = "intervals"
    PERIODIC = "periodic_concurrency"


class SharedMemory(StrEnum):
    NONE = "none"
    SYSTEM = "system"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The kind and amount of load."""

    mode: Mode = Mode.CONCURRENCY
    levels: LoadRange = field(default_factory=lambda: LoadRange(1))
    # In place of the range: these levels, in this order.
    values: tuple[float, ...] = ()
    is_binary: bool = False
    is_poisson: bool = False
    intervals_ns: tuple[int, ...] = ()
    request_period: int = 10
    # Processes; None: as many as this machine can spare.
    num_workers: int | None = None
    lanes_per_connection: int = 6
    max_lanes: int = 1024
    num_sequences: int = 4
    sequences: Sequences = field(default_factory=Sequences)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class MeasurementOptions:
    """How long is measured, and when it is enough."""

    counts_requests: bool = False
    interval_s: float = 5.0
    window_requests: int = 50
    max_trials: int = 10
    stability: Stability = field(default_factory=Stability)
    num_warmup_requests: int = 0
    # 0: windows until they agree.
    num_requests: int = 0


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The form of a request."""

    data: DataOptions = field(default_factory=DataOptions)
    headers: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    is_input_json: bool = False
    is_output_json: bool = False
    algorithm: str = "none"
    frame_bytes: int = 16384
    shared_memory: SharedMemory = SharedMemory.NONE
    output_region_bytes: int = 102400


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Scraping of the server's metrics during measurements."""

    is_collected: bool = False
    address: Address = field(default_factory=lambda: Address("localhost", 8002))
    path: str = "/metrics"
    interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Where results go. `json_file` "-" is standard output."""

    verbosity: int = 0
    csv_file: Path | None = None
    is_csv_verbose: bool = False
    export_file: Path | None = None
    json_file: str = ""
    html_file: Path | None = None
    # Of the machine, in any currency; 0: costs are not told.
    price_per_hour: float = 0.0

    def price_per_million(self, per_second: float) -> float | None:
        """What a million costs of what the machine does so often a second; None if that is not known."""
        if not self.price_per_hour or per_second <= 0:
            return None
        return self.price_per_hour * 1e6 / (3600 * per_second)

    def price_line(self, what: str, per_second: float) -> list[str]:
        """The line of a report, if there is a price."""
        price = self.price_per_million(per_second)
        return [] if price is None else [f"Cost per million {what}: {price:.4g} at {self.price_per_hour:g} per hour"]


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """A run of inference requests."""

    model: str
    version: str = ""
    is_grpc: bool = False
    is_streaming: bool = False
    address: Address = field(default_factory=lambda: Address("localhost", 8000))
    composing: tuple[tuple[str, str], ...] = ()
    load: LoadOptions = field(default_factory=LoadOptions)
    measurement: MeasurementOptions = field(default_factory=MeasurementOptions)
    request: RequestOptions = field(default_factory=RequestOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    report: ReportOptions = field(default_factory=ReportOptions)
    # A sentence for each option without effect.
    notes: tuple[str, ...] = ()
