"""How long each flood lives, and what it costs the server and a client beside it. Run it; it is no test.

    PYTHONPATH=tests:. python tests/wire/attacks/measure.py [--loop uvloop] [--only floods windows slow idle tls]

The server, the attacker and the client beside it are a process each; figures are those of one attack after the other,
on a machine that should be quiet. With fewer than three cores to spare, the p99 are still upper bounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from support.certificates import Authority
from support.floods import FLOODS
from support.http2_frames import PREFACE, Setting, settings, settings_ack, window_update
from support.raw_http1 import Http1Peer
from support.raw_http2 import Peer
from support.wires import running_wire

from modelserver.core.interpreter import keep_for_good
from modelserver.wire.tls import TlsFiles

MIB = 1 << 20
NUM_IDLE = 5000
NUM_SECURED = 1000
NUM_SLOW = 1000
# How long somebody else asks while slow peers are there, from their first byte on.
PROBING_S = 5
_POST = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
HTTP1_FLOODS = {
    "http1: fields without end": b"GET / HTTP/1.1\r\nHost: test\r\n" + b"X: a\r\n" * 100_000,
    "http1: a target of 1 MB": b"GET /" + b"a" * 1_000_000,
    "http1: chunks of one byte": _POST + b"1\r\nx\r\n" * 100_000,
    "http1: extensions of chunks": _POST + (b"1;" + b"x" * 1000 + b"\r\nx\r\n") * 1000,
    "http1: trailers without end": _POST + b"0\r\n" + b"X: a\r\n" * 100_000,
}
SLOW = {
    "head": b"GET / HTTP/1.1\r\nHost: test\r\n",
    "body": b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 100\r\n\r\nhalf",
    "reader": b"GET /pieces/1000000/10000 HTTP/1.1\r\nHost: test\r\n\r\n",
}


@dataclass(frozen=True)
class Cost:
    lived_ms: float
    server_cpu_ms: float
    grown_mib: float
    # Of a client that makes one call after the other meanwhile.
    neighbour_p99_ms: float


def serve(ready: Connection, loop: str, tls: TlsFiles | None) -> None:
    with running_wire(loop=loop, tls=tls) as wire:
        keep_for_good()  # as the server itself
        ready.send(wire.address)
        ready.recv()


@contextmanager
def server(loop: str, tls: TlsFiles | None = None) -> Iterator[tuple[tuple[str, int], psutil.Process]]:
    """A server in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, loop, tls))
    process.start()
    try:
        yield ours.recv(), psutil.Process(process.pid)
    finally:
        ours.send(None)
        process.join()


def cpu_s(process: psutil.Process) -> float:
    """Of all threads, to the microsecond (psutil's own figures are hundredths of a second)."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def ask_on(address: tuple[str, int], stop: Connection) -> None:
    """One call after the other until told to `stop`; sends back the seconds that they took."""
    latencies_s: list[float] = []
    with Peer(address) as peer:
        peer.send(window_update(0, 1 << 30))
        stop.send(None)
        stream_id = 1
        while not stop.poll() or len(latencies_s) < 20:
            begun = time.perf_counter()
            peer.call(stream_id, "Echo", b"abc")
            peer.expect_answer(stream_id)
            latencies_s.append(time.perf_counter() - begun)
            stream_id += 2
            time.sleep(0.001)
    stop.send(latencies_s)


@contextmanager
def neighbour(address: tuple[str, int]) -> Iterator[list[float]]:
    """A client that makes one call after the other; what it yields is how long they took, once the block ended."""
    latencies_s: list[float] = []
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=ask_on, args=(address, theirs))
    process.start()
    ours.recv()
    try:
        yield latencies_s
    finally:
        ours.send(None)
        latencies_s += ours.recv()
        process.join()


def p99_ms(latencies_s: list[float]) -> float:
    return 1000 * statistics.quantiles(latencies_s, n=100, method="inclusive")[98]


def flood_http2(address: tuple[str, int], flood: bytes) -> None:
    with Peer(address) as attacker:
        attacker.send_bytes(flood)
        attacker.expect_closed()


def flood_http1(address: tuple[str, int], flood: bytes) -> None:
    with Http1Peer(address) as attacker:
        attacker.try_send(flood)
        attacker.read_all()


def measure(address: tuple[str, int], process: psutil.Process, attack: Callable[[], None]) -> Cost:
    with neighbour(address) as latencies_s:
        rss, cpu, begun = process.memory_info().rss, cpu_s(process), time.perf_counter()
        attack()
        ended = time.perf_counter()
        time.sleep(0.05)
        spent = cpu_s(process) - cpu
        grown = process.memory_info().rss - rss
    return Cost(1000 * (ended - begun), 1000 * spent, grown / MIB, p99_ms(latencies_s))


def connect_http2(address: tuple[str, int], count: int) -> list[Peer]:
    """So many clients that come together, and know the server's settings."""
    peers = [Peer(address, shakes_hands=False) for _ in range(count)]
    for peer in peers:
        peer.send_bytes(PREFACE + settings().encode())
    for peer in peers:
        peer.until(lambda: peer.num_settings_acks > 0, "the server's settings")  # noqa: B023
        peer.send(settings_ack())
    return peers


def connect_http1(address: tuple[str, int], count: int, tls: ssl.SSLContext | None = None) -> list[Http1Peer]:
    """So many clients that come together, and have had an answer."""
    peers = [Http1Peer(address, tls=tls) for _ in range(count)]
    for peer in peers:
        peer.ask("/")
    for peer in peers:
        peer.read_answer()
    return peers


def measure_idle(address: tuple[str, int], process: psutil.Process) -> None:
    """Memory and CPU of connections that do nothing, over each protocol, and what a client notices of them."""
    connects: dict[str, Callable[[tuple[str, int], int], Sequence[Peer | Http1Peer]]]
    connects = {"HTTP/2": connect_http2, "HTTP/1.1": connect_http1}
    rss = process.memory_info().rss  # before any: what the first have left is taken by the next
    for (name, connect), together in product(connects.items(), (1, 50)):
        cpu = cpu_s(process)
        peers = [peer for _ in range(NUM_IDLE // together) for peer in connect(address, together)]
        grown, spent = process.memory_info().rss - rss, cpu_s(process) - cpu
        with neighbour(address) as latencies_s:
            time.sleep(1)
        print(
            f"{NUM_IDLE} idle over {name}, {together} at a time: {grown / NUM_IDLE / 1024:.1f} KiB and "
            f"{1e6 * spent / NUM_IDLE:.0f} us of CPU each; p99 beside them {p99_ms(latencies_s):.1f} ms"
        )
        for peer in peers:
            peer.close()
        time.sleep(1)  # their ends are no part of the next ones' cost


def measure_tls(loop: str) -> None:
    """Memory and CPU of connections with TLS that do nothing, on a server of its own."""
    with tempfile.TemporaryDirectory() as directory:
        authority = Authority(Path(directory))
        pair = authority.pair("server")
        trust = authority.client_context(("http/1.1",))
        with server(loop, TlsFiles(str(pair.certificate), str(pair.key))) as (address, process):
            first = connect_http1(address, 50, trust)
            rss, cpu = process.memory_info().rss, cpu_s(process)
            peers = [peer for _ in range(NUM_SECURED) for peer in connect_http1(address, 1, trust)]
            grown, spent = process.memory_info().rss - rss, cpu_s(process) - cpu
            print(
                f"{NUM_SECURED} idle over HTTP/1.1 with TLS: {grown / NUM_SECURED / 1024:.1f} KiB and "
                f"{1e6 * spent / NUM_SECURED:.0f} us of CPU each"
            )
            for peer in [*first, *peers]:
                peer.close()


def measure_slow(address: tuple[str, int], process: psutil.Process) -> None:
    """What a client notices of a thousand that never end what they have begun."""
    for name, sent in SLOW.items():
        rss = process.memory_info().rss
        peers = [Http1Peer(address, receive_buffer_bytes=4096) for _ in range(NUM_SLOW)]
        with neighbour(address) as latencies_s:
            for peer in peers:
                peer.send(sent)
            time.sleep(PROBING_S)
            grown = process.memory_info().rss - rss
        print(
            f"{NUM_SLOW} with a slow {name}: p99 beside them {p99_ms(latencies_s):.1f} ms, "
            f"at most {1000 * max(latencies_s):.1f} ms; {grown / MIB:.0f} MiB"
        )
        for peer in peers:
            peer.close()


def measure_zero_windows(address: tuple[str, int], process: psutil.Process) -> None:
    """Memory that answers take which nobody lets out, while they wait and afterwards."""
    before = process.memory_info().rss
    for _ in range(3):
        with Peer(address, announces={Setting.INITIAL_WINDOW_SIZE: 0}) as stalled:
            for stream_id in range(1, 201, 2):
                stalled.call(stream_id, "Size", b"%d" % MIB)
            stalled.expect_alive()
            held = process.memory_info().rss - before
        time.sleep(2.5)  # the server looks once a second
        left = process.memory_info().rss - before
        print(f"100 answers of 1 MiB that nobody reads: {held / MIB:.1f} MiB, {left / MIB:.1f} MiB afterwards")


def measure_floods(address: tuple[str, int], process: psutil.Process) -> None:
    """Each flood alone."""
    print(f"{'flood':42} {'lived ms':>9} {'CPU ms':>7} {'MiB':>6} {'p99 ms':>7}")
    floods = {name: partial(flood_http2, address, flood) for name, (flood, _, _) in FLOODS.items()}
    floods |= {name: partial(flood_http1, address, flood) for name, flood in HTTP1_FLOODS.items()}
    for name, attack in floods.items():
        cost = measure(address, process, attack)
        print(
            f"{name:42} {cost.lived_ms:9.1f} {cost.server_cpu_ms:7.1f} {cost.grown_mib:6.1f} "
            f"{cost.neighbour_p99_ms:7.2f}"
        )


# Idle ones before slow ones, whose memory they would take over.
PARTS = {"floods": measure_floods, "windows": measure_zero_windows, "idle": measure_idle, "slow": measure_slow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", default="uvloop", choices=["asyncio", "uvloop"])
    parser.add_argument("--only", nargs="+", default=[*PARTS, "tls"], choices=[*PARTS, "tls"])
    arguments = parser.parse_args()
    # Both ends of the connections, of which the server's process inherits its share.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
    with server(arguments.loop) as (address, process):
        with Peer(address) as peer:
            peer.call(1, "Echo")
            peer.expect_answer(1)
        for part in arguments.only:
            if part in PARTS:
                PARTS[part](address, process)
    if "tls" in arguments.only:
        measure_tls(arguments.loop)


if __name__ == "__main__":
    main()
