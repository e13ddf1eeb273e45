"""Counts of fronts in the counts of the server."""

from __future__ import annotations

import msgspec

from modelserver.telemetry.wire_counts import Protocol, Violation, WireCounts
from modelserver.wire.processes.counts import CountsReader, CountsShare
from modelserver.wire.processes.messages import PortCounts


def carried(growth: PortCounts) -> PortCounts:
    """As it comes out of a datagram."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(growth), type=PortCounts)


def test_fronts_add_up() -> None:
    total = WireCounts()
    fronts = [WireCounts() for _ in range(3)]
    readers = [CountsReader(front) for front in fronts]
    shares = [CountsShare(total) for _ in fronts]
    for number in range(1, 4):
        for front, reader, share in zip(fronts, readers, shares, strict=True):
            front.opened(Protocol.HTTP1)
            front.opened(Protocol.HTTP2)
            front.closed(Protocol.HTTP1)
            front.open_streams = number
            front.violated(Protocol.HTTP2, Violation.TOO_MANY_RESETS)
            share.add(carried(reader.growth()))
    assert total.connections_opened == {Protocol.HTTP1: 9, Protocol.HTTP2: 9}
    assert (total.connections_open[Protocol.HTTP1], total.connections_open[Protocol.HTTP2]) == (0, 9)
    assert total.open_streams == 9
    assert total.violations == {(Protocol.HTTP2, Violation.TOO_MANY_RESETS): 9}


def test_nothing_new_is_nothing() -> None:
    counts = WireCounts()
    reader = CountsReader(counts)
    counts.opened(Protocol.HTTP1)
    reader.growth()
    assert reader.growth() == PortCounts(opened={}, open={}, open_streams=0, violations=[])


def test_a_front_that_is_gone_has_nothing_open_but_has_counted() -> None:
    total = WireCounts()
    total.opened(Protocol.HTTP2)
    front = WireCounts()
    share = CountsShare(total)
    front.opened(Protocol.HTTP2)
    front.open_streams = 5
    share.add(CountsReader(front).growth())
    share.withdraw()
    share.withdraw()
    assert total.connections_open[Protocol.HTTP2] == 1
    assert total.connections_opened[Protocol.HTTP2] == 2
    assert total.open_streams == 0
