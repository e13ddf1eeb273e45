"""A thousand slow connections at once: ours, whose time passes as it is told to, and slowhttptest's, in real time."""

from __future__ import annotations

import re
import resource
import subprocess
from collections.abc import Iterator

import pytest
from support.http2_frames import window_update
from support.neighbour import Neighbour
from support.raw_http1 import Http1Peer
from support.raw_http2 import Peer
from support.tools import tool
from support.wires import RunningWire, running_wire

from modelserver.wire.limits import TimeLimits, WireLimits

pytestmark = pytest.mark.slow

NUM_PEERS = 1000
HEAD = b"GET / HTTP/1.1\r\nHost: test\r\nX-One: 1\r\n"
BODY = b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\nhalf"
READ = b"GET /pieces/1000000/10000 HTTP/1.1\r\nHost: test\r\n\r\n"
# So that slowhttptest, which sends or reads a little every four seconds, is too slow for each of them.
IMPATIENT = WireLimits(
    times=TimeLimits(head_s=2, body_pause_s=2, body_window_s=2, slow_reader_s=2, http1_idle_s=2, linger_s=0.05)
)
TEST_S = 60
SLOW = ("-c", str(NUM_PEERS), "-r", str(NUM_PEERS), "-l", str(TEST_S), "-p", "20", "-i", "4")


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Room for both ends of a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("sent", "reason", "count"),
    # The system takes some MiB of an answer for each reader, which is the time that this costs.
    [(HEAD, "slow_head", NUM_PEERS), (BODY, "slow_body", NUM_PEERS), (READ, "slow_reader", 200)],
    ids=["head", "body", "read"],
)
def test_many_slow_peers(wire: RunningWire, neighbour: Neighbour, sent: bytes, reason: str, count: int) -> None:
    before = wire.violations(reason)
    peers = [Http1Peer(wire.address, receive_buffer_bytes=4096) for _ in range(count)]
    for peer in peers:
        peer.send(sent)
    neighbour.is_served()
    wire.until(lambda: wire.open_connections() == count + 1, "all are connected")
    if sent == READ:
        wire.until(lambda: wire.http.num_writers == count, "all are being answered")
    else:
        wire.until(lambda: http1_connections(wire) == count, "all have begun")
    neighbour.is_served()

    def are_all_ended() -> bool:
        # Again and again: the system may still be taking what a reader has not asked for.
        wire.pass_time(61)
        return wire.violations(reason) == before + count

    wire.until(are_all_ended, "each was ended by its limit")
    neighbour.is_served()
    for peer in peers:
        peer.close()
    wire.until(lambda: wire.open_connections() == 1, "all are gone")


def http1_connections(wire: RunningWire) -> int:
    return sum(count for protocol, count in wire.counts.connections_open.items() if protocol.value == "http1")


@pytest.mark.tool("slowhttptest")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("how", "path", "reason"),
    [
        (("-H",), "/", "slow_head"),
        (("-B", "-s", "8192"), "/echo", "slow_body"),
        (("-X", "-w", "512", "-y", "1024", "-n", "4", "-z", "32"), "/pieces/1000000/10000", "slow_reader"),
    ],
    ids=["slowloris", "body", "read"],
)
def test_slowhttptest(loop: str, how: tuple[str, ...], path: str, reason: str) -> None:
    """The server closes all of its connections, long before it would end on its own."""
    with running_wire(loop=loop, limits=IMPATIENT) as wire:
        command = [tool("slowhttptest"), *SLOW, *how, "-u", f"http://{wire.url}{path}"]
        with (
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as attacker,
            Peer(wire.address) as peer,
        ):
            peer.send(window_update(0, 1 << 30))
            neighbour = Neighbour(peer)
            while attacker.poll() is None and sum(wire.all_violations.values()) < NUM_PEERS:
                neighbour.is_served()
            if reason == "slow_reader":
                # It reads on what the system had taken for it, and would notice later than it ends.
                attacker.terminate()
            shown = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", attacker.communicate()[0])
            neighbour.is_served()
        assert reason == "slow_reader" or "No open connections left" in shown, shown[-1000:]
        assert set(re.findall(r"service available:\s*(\w+)", shown)) <= {"YES"}
        # On a busy machine it does not get round to ask on all of its connections in time.
        assert sum(wire.all_violations.values()) >= NUM_PEERS
        assert wire.violations(reason) > 0
        assert set(wire.all_violations) <= {reason, "slow_head"}
        wire.expect_idle()
