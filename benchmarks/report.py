"""Measurements, their medians over rounds, and the table that is printed."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.load import Load, LoadResult, run_load
from benchmarks.servers.process import ServerProcess


@dataclass(frozen=True, slots=True)
class Measurement:
    """One server under one load: the medians over its rounds."""

    case: str
    server: str
    concurrency: int
    per_second: float
    cpu_us: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A ratio, what was measured, and the target that the project has set itself, if it has."""

    case: str
    what: str
    measured: float
    target: str = ""
    is_met: bool | None = None

    def mark(self, missed: str) -> str:
        """One word on the target: met, or `missed`."""
        return "" if self.is_met is None else "met" if self.is_met else missed


def measure(
    case: str,
    servers: list[tuple[ServerProcess, Load]],
    *,
    rounds: int,
    port: str,
    run: Callable[[Load, int], LoadResult] = run_load,
) -> list[Measurement]:
    """Put each server under its load in turn, `rounds` times, so that drift of the machine hits all alike."""
    samples: dict[str, list[tuple[float, float, float, float]]] = {server.name: [] for server, _ in servers}
    for _ in range(rounds):
        for server, load in servers:
            cpu = server.cpu_s()
            result = run(load, server.ports[port])
            # CPU also covers the warm-up, whose requests are not counted: scale it to the counted share.
            share = result.seconds / (result.seconds + load.warmup_s)
            cpu_us = (server.cpu_s() - cpu) * share / result.count * 1e6
            samples[server.name].append((result.per_second, cpu_us, result.p50_us, result.p99_us))
    return [
        Measurement(
            case, server.name, load.concurrency, *map(statistics.median, zip(*samples[server.name], strict=True))
        )
        for server, load in servers
    ]


class Report:
    """Collects the measurements and verdicts of one run."""

    def __init__(self) -> None:
        self.measurements: list[Measurement] = []
        self.verdicts: list[Verdict] = []
        self.console = Console()

    def add(self, measurements: list[Measurement]) -> None:
        self.measurements += measurements
        for row in measurements:
            self.console.print(
                f"  {row.case}  {row.server:<22} c{row.concurrency:<3} {row.per_second:>9.0f}/s "
                f"{row.cpu_us:>9.1f} us CPU  p50 {row.p50_us:>8.0f} us  p99 {row.p99_us:>8.0f} us",
                highlight=False,
            )

    def at_most(self, case: str, what: str, measured: float, limit: float) -> None:
        self.verdicts.append(Verdict(case, what, measured, f"<= {limit:g}", measured <= limit))

    def at_least(self, case: str, what: str, measured: float, limit: float) -> None:
        self.verdicts.append(Verdict(case, what, measured, f">= {limit:g}", measured >= limit))

    def tell(self, case: str, what: str, measured: float) -> None:
        """A ratio without a target."""
        self.verdicts.append(Verdict(case, what, measured))

    def print(self) -> None:
        table = Table(title=f"modelserver benchmarks ({platform.machine()}, Python {platform.python_version()})")
        for column in ("case", "what", "measured", "target", ""):
            table.add_column(column, justify="right" if column in ("measured", "target") else "left")
        for verdict in self.verdicts:
            table.add_row(verdict.case, verdict.what, f"{verdict.measured:.3g}", verdict.target, verdict.mark("MISSED"))
        self.console.print(table)

    def markdown(self) -> str:
        """The verdicts and the measurements as two tables, for docs/performance.md."""
        lines = ["| case | what | measured | target | |", "|---|---|--:|--:|---|"]
        for verdict in self.verdicts:
            mark = verdict.mark("**missed**")
            lines.append(f"| {verdict.case} | {verdict.what} | {verdict.measured:.3g} | {verdict.target} | {mark} |")
        lines += [
            "",
            "| case | server | concurrency | requests/s | server CPU µs | p50 µs | p99 µs |",
            "|---|---|--:|--:|--:|--:|--:|",
        ]
        for row in self.measurements:
            figures = f"{row.per_second:.0f} | {row.cpu_us:.1f} | {row.p50_us:.0f} | {row.p99_us:.0f}"
            lines.append(f"| {row.case} | {row.server} | {row.concurrency} | {figures} |")
        return "\n".join(lines) + "\n"

    def save(self, path: Path) -> None:
        rows = {
            "measurements": [asdict(row) for row in self.measurements],
            "verdicts": [asdict(row) for row in self.verdicts],
        }
        path.write_text(json.dumps(rows, indent=1) + "\n")
