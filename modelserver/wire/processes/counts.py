"""A front's counts of its ports, merged into the counts of the server."""

from __future__ import annotations

from collections import Counter

from modelserver.telemetry.wire_counts import Protocol, Violation, WireCounts
from modelserver.wire.processes.messages import PortCounts


class CountsReader:
    """In the front: the growth of a `WireCounts`."""

    def __init__(self, counts: WireCounts) -> None:
        self._counts = counts
        self._opened: Counter[Protocol] = Counter()
        self._open: Counter[Protocol] = Counter()
        self._open_streams = 0
        self._violations: Counter[tuple[Protocol, Violation]] = Counter()

    def growth(self) -> PortCounts:
        """Since the last call; gauges may have shrunk."""
        counts = self._counts
        growth = PortCounts(
            opened=_difference(counts.connections_opened, self._opened),
            open=_difference(counts.connections_open, self._open),
            open_streams=counts.open_streams - self._open_streams,
            violations=[
                (protocol.value, violation.value, number - self._violations[protocol, violation])
                for (protocol, violation), number in counts.violations.items()
                if number != self._violations[protocol, violation]
            ],
        )
        self._opened = counts.connections_opened.copy()
        self._open = counts.connections_open.copy()
        self._open_streams = counts.open_streams
        self._violations = counts.violations.copy()
        return growth


class CountsShare:
    """In the core: one front's part of a `WireCounts`. Its gauges leave with it, its counters stay."""

    def __init__(self, counts: WireCounts) -> None:
        self._counts = counts
        self._open: Counter[Protocol] = Counter()
        self._open_streams = 0

    def add(self, growth: PortCounts) -> None:
        """Add the front's counts."""
        counts = self._counts
        for name, number in growth.opened.items():
            counts.connections_opened[Protocol(name)] += number
        for name, number in growth.open.items():
            counts.connections_open[Protocol(name)] += number
            self._open[Protocol(name)] += number
        counts.open_streams += growth.open_streams
        self._open_streams += growth.open_streams
        for protocol, violation, number in growth.violations:
            counts.violations[Protocol(protocol), Violation(violation)] += number

    def withdraw(self) -> None:
        """The front is gone. Safe to repeat."""
        for protocol, number in self._open.items():
            self._counts.connections_open[protocol] -= number
        self._counts.open_streams -= self._open_streams
        self._open.clear()
        self._open_streams = 0


def _difference(now: Counter[Protocol], before: Counter[Protocol]) -> dict[str, int]:
    return {protocol.value: number - before[protocol] for protocol, number in now.items() if number != before[protocol]}
