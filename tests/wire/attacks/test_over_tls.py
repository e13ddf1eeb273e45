"""The worst of it over TLS: transports of TLS pause, close and fail in their own ways."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.certificates import Authority
from support.floods import FLOODS
from support.http2_frames import Setting, window_update
from support.neighbour import Neighbour
from support.raw_http2 import Peer
from support.situations import NUM_CALLS, SITUATIONS, open_block
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import TimeLimits, WireLimits
from modelserver.wire.tls import TlsFiles

MIB = 1 << 20


@dataclass(frozen=True)
class Secured:
    """A port with TLS, and what a client of it trusts."""

    wire: RunningWire
    trust: ssl.SSLContext

    def peer(self, **details: object) -> Peer:
        return Peer(self.wire.address, tls=self.trust, **details)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory: Path = tmp_path_factory.mktemp("certificates")
    authority = Authority(directory)
    pair = authority.pair("server")
    files = TlsFiles(str(pair.certificate), str(pair.key))
    limits = WireLimits(times=TimeLimits(head_s=0.5))
    with running_wire(loop=request.param, limits=limits, tls=files) as running:
        yield Secured(running, authority.client_context(("h2",)))


@pytest.fixture
def beside(secured: Secured) -> Iterator[Neighbour]:
    """A client that behaves, before, beside and after."""
    with secured.peer() as peer:
        found = Neighbour(peer)
        found.is_served()
        yield found
        found.is_served()
    secured.wire.expect_idle()


@pytest.mark.parametrize(
    "name", ["rapid-reset", "settings", "pings", "empty-data", "continuations", "malformed-requests"]
)
def test_floods(secured: Secured, beside: Neighbour, name: str) -> None:
    flood, code, reason = FLOODS[name]
    before = secured.wire.violations(reason)
    with secured.peer() as attacker:
        attacker.send_bytes(flood)
        beside.is_served()
        attacker.expect_closed()
        assert [told.code for told in attacker.goaways] == [code]
    assert secured.wire.violations(reason) == before + 1


@pytest.mark.parametrize("name", ["rapid-reset", "malformed-requests", "settings"])
def test_attackers_that_do_not_wait_for_the_end(secured: Secured, beside: Neighbour, name: str) -> None:
    for how in ("close", "vanish") * 10:
        attacker = secured.peer()
        attacker.send_bytes(FLOODS[name][0])
        getattr(attacker, how)()
    secured.wire.until(lambda: secured.wire.open_connections() == 1, "all attackers are gone")


@pytest.mark.parametrize("how", ["close", "vanish"])
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.__name__)
def test_clients_that_leave(secured: Secured, beside: Neighbour, situation: object, how: str) -> None:
    peer = secured.peer()
    situation(peer)  # type: ignore[operator]
    if situation is not open_block:
        peer.expect_alive()
        secured.wire.until(lambda: secured.wire.counts.open_streams == NUM_CALLS, "the server has them all")
    getattr(peer, how)()
    secured.wire.until(lambda: secured.wire.open_connections() == 1, "the connection is gone")


def test_a_stalled_reader(secured: Secured, beside: Neighbour) -> None:
    windows = {Setting.INITIAL_WINDOW_SIZE: 1 << 30}
    with secured.peer(announces=windows, receive_buffer_bytes=4096) as stalled:
        stalled.send(window_update(0, 1 << 30))
        for stream_id in range(1, 41, 2):
            stalled.call(stream_id, "Size", b"%d" % MIB)
        beside.is_served()
        secured.wire.pass_time(61)
        secured.wire.until(lambda: secured.wire.open_connections() == 1, "the stalled connection was cut")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n"])
def test_handshakes_that_do_not_come_to_an_end(secured: Secured, beside: Neighbour, sent: bytes) -> None:
    before = secured.wire.violations("tls_handshake")
    clients = [socket.create_connection(secured.wire.address, timeout=10) for _ in range(20)]
    for client in clients:
        client.sendall(sent)
    beside.is_served()
    for client in clients:
        while client.recv(1000):
            continue
        client.close()
    secured.wire.until(lambda: secured.wire.violations("tls_handshake") == before + 20, "all were counted")


@pytest.mark.parametrize(("method", "num_bytes"), [("GET", 0), ("HEAD", 0), ("OPTIONS", 0), ("POST", 10), ("PUT", MIB)])
def test_clients_that_ask_without_tls_are_told(
    secured: Secured, beside: Neighbour, method: str, num_bytes: int
) -> None:
    head = f"{method} /v2/health/live HTTP/1.1\r\nHost: here\r\nContent-Length: {num_bytes}\r\n\r\n"
    with socket.create_connection(secured.wire.address, timeout=10) as client:
        client.sendall(head.encode())
        client.sendall(bytes(num_bytes))
        answer = b"".join(iter(lambda: client.recv(1000), b""))
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(body) == {"error": "this port speaks TLS; ask https:// instead"}
