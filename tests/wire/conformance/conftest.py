"""One server on our own wire, and raw peers of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.raw_http2 import Peer
from support.wires import RunningWire, running_wire


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def wire(request: pytest.FixtureRequest) -> Iterator[RunningWire]:
    """A port with test handlers, on each event loop in turn."""
    with running_wire(loop=request.param) as running:
        yield running


@pytest.fixture
def peer(wire: RunningWire) -> Iterator[Peer]:
    """A connection after the exchange of settings; nothing of it is left on the server afterwards."""
    with Peer(wire.address) as connected:
        yield connected
    wire.expect_idle()
