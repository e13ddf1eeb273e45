"""Servers for clients that others wrote: a port with test handlers, and a whole server with one port for everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.certificates import Authority
from support.layouts import layout
from support.serving import RunningServer, running_server
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import WireLimits
from modelserver.wire.tls import TlsFiles

MIB = 1 << 20
# As large as clients may want it, so that what is tested is the wire and not a limit.
LIMITS = WireLimits(max_body_bytes=80 * MIB, max_message_bytes=80 * MIB)


@pytest.fixture(scope="session", params=["asyncio", "uvloop"])
def wire(request: pytest.FixtureRequest) -> Iterator[RunningWire]:
    """A port with test handlers for both protocols, on each event loop in turn."""
    with running_wire(loop=request.param, limits=LIMITS) as running:
        yield running
        # Not `expect_idle`: grpcio keeps connections of channels that are closed for as long as it likes.
        running.until(lambda: running.counts.open_streams == 0, "all streams were closed")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def tls_wire(authority: Authority) -> Iterator[RunningWire]:
    """The same with TLS."""
    pair = authority.pair("server")
    with running_wire(loop="uvloop", limits=LIMITS, tls=TlsFiles(str(pair.certificate), str(pair.key))) as running:
        yield running
        running.expect_idle()


@pytest.fixture(scope="session")
def one_port(model_repository: Path) -> Iterator[RunningServer]:
    """A whole server with the identity model that serves HTTP and gRPC on one port."""
    options = {
        "http_max_input_size": 80 * MIB,
        "model_control_mode": "explicit",
        "load_model": ("identity",),
    }
    with ExitStack() as stack:
        with layout("native-one-port"):  # of this server only: it lives longer than the tests that ask it
            running = stack.enter_context(running_server(model_repository, **options))
        yield running
