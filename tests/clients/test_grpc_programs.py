"""grpc-go, grpc-java and grpc-js: directly, over TLS with answers compressed, and through proxies. All find the same.

grpc-go has a deadline per call, so that no header block is like another, and windows of 64 KiB that grow; grpc-java (on
Netty) says PRIORITY with every HEADERS and sends frames of up to 64 KiB; grpc-js is nghttp2, strict about every block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certificates import Authority
from support.client_programs import EXPECTED, PROGRAMS, ClientProgram
from support.proxies import running_proxy
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import WireLimits
from modelserver.wire.tls import TlsFiles

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session", params=PROGRAMS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ClientProgram:
    """Each of the clients in turn, built."""
    return ClientProgram(request.param, tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def compressing(authority: Authority) -> Iterator[RunningWire]:
    """A port with TLS that compresses answers for those who accept it."""
    pair = authority.pair("compressing")
    files = TlsFiles(str(pair.certificate), str(pair.key))
    with running_wire(loop="uvloop", limits=WireLimits(grpc_compression="low"), tls=files) as running:
        yield running
        running.expect_idle()


def test_directly(program: ClientProgram, wire: RunningWire) -> None:
    assert program.found(wire.url) == EXPECTED
    wire.until(lambda: not wire.grpc.held, "handlers of calls that had ended were told")


def test_over_tls_with_compressed_answers(
    program: ClientProgram, compressing: RunningWire, authority: Authority
) -> None:
    """They refuse a server that does not agree on h2 by ALPN."""
    assert program.found(compressing.url, authority.certificate) == EXPECTED
    compressing.until(lambda: not compressing.grpc.held, "handlers of calls that had ended were told")


@pytest.mark.parametrize(
    "proxy",
    [
        pytest.param("nginx", marks=pytest.mark.tool("nginx")),
        pytest.param("haproxy", marks=pytest.mark.tool("haproxy")),
    ],
)
def test_behind_a_proxy(program: ClientProgram, proxy: str, wire: RunningWire, tmp_path: Path) -> None:
    with running_proxy(proxy, wire.url, tmp_path) as running:
        assert program.found(running.grpc_url) == EXPECTED
    wire.until(lambda: not wire.grpc.held, "handlers of calls that had ended were told")
