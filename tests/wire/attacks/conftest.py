"""A server on our own wire, and beside every attack a client that behaves and must not notice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.neighbour import Neighbour
from support.raw_http2 import Peer
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import TimeLimits, WireLimits


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def wire(request: pytest.FixtureRequest) -> Iterator[RunningWire]:
    """A port with test handlers and the default limits, on each event loop in turn; it does not linger long."""
    with running_wire(loop=request.param, limits=WireLimits(times=TimeLimits(linger_s=0.05))) as running:
        yield running


@pytest.fixture
def neighbour(wire: RunningWire) -> Iterator[Neighbour]:
    """Served before and after the test; afterwards nothing of the attack is left."""
    with Peer(wire.address) as peer:
        found = Neighbour(peer)
        found.is_served()
        yield found
        found.is_served()
    wire.expect_idle()
