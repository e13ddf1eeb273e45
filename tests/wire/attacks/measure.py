"""How long each flood lives, and what it costs the server and a client beside it. Run it; it is no test.

    PYTHONPATH=tests python tests/wire/attacks/measure.py [--loop uvloop]

The server is a process of its own; figures are those of one attack after the other, on a machine that should be quiet.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from support.floods import FLOODS
from support.raw_http1 import Http1Peer
from support.raw_http2 import Peer
from support.wires import running_wire

MIB = 1 << 20
NUM_IDLE = 2000


@dataclass(frozen=True)
class Cost:
    lived_ms: float
    server_cpu_ms: float
    grown_mib: float
    # Of a client that makes one call after the other meanwhile.
    neighbour_p99_ms: float


def serve(ready: Connection, loop: str) -> None:
    with running_wire(loop=loop) as wire:
        ready.send(wire.address)
        ready.recv()


@contextmanager
def server(loop: str) -> Iterator[tuple[tuple[str, int], psutil.Process]]:
    """A server in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, loop))
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


def measure(address: tuple[str, int], process: psutil.Process, flood: bytes) -> Cost:
    latencies_s: list[float] = []
    stop = threading.Event()

    def call() -> None:
        with Peer(address) as peer:
            stream_id = 1
            while not stop.is_set() or len(latencies_s) < 20:
                begun = time.perf_counter()
                peer.call(stream_id, "Echo", b"abc")
                peer.expect_answer(stream_id)
                latencies_s.append(time.perf_counter() - begun)
                stream_id += 2
                time.sleep(0.001)

    neighbour = threading.Thread(target=call)
    neighbour.start()
    try:
        rss, cpu, begun = process.memory_info().rss, cpu_s(process), time.perf_counter()
        with Peer(address) as attacker:
            attacker.send_bytes(flood)
            attacker.expect_closed()
        ended = time.perf_counter()
        time.sleep(0.05)
        spent = cpu_s(process) - cpu
        grown = process.memory_info().rss - rss
    finally:
        stop.set()
        neighbour.join()
    p99 = statistics.quantiles(latencies_s, n=100)[98]
    return Cost(1000 * (ended - begun), 1000 * spent, grown / MIB, 1000 * p99)


def measure_idle(address: tuple[str, int], process: psutil.Process) -> None:
    """Memory and CPU of connections that do nothing, over each protocol."""
    for name, connect in {"HTTP/2": Peer, "HTTP/1.1": Http1Peer}.items():
        rss, cpu = process.memory_info().rss, cpu_s(process)
        peers = []
        for _ in range(NUM_IDLE):
            peer = connect(address)
            if isinstance(peer, Http1Peer):
                peer.ask("/")
                peer.read_answer()
            peers.append(peer)
        grown, spent = process.memory_info().rss - rss, cpu_s(process) - cpu
        print(
            f"idle {name}: {grown / NUM_IDLE / 1024:.1f} KiB and {1e6 * spent / NUM_IDLE:.0f} us of CPU per connection"
        )
        for peer in peers:
            peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loop", default="uvloop", choices=["asyncio", "uvloop"])
    arguments = parser.parse_args()
    with server(arguments.loop) as (address, process):
        with Peer(address) as peer:
            peer.call(1, "Echo")
            peer.expect_answer(1)
        print(f"{'flood':42} {'lived ms':>9} {'CPU ms':>7} {'MiB':>6} {'p99 ms':>7}")
        for name, (flood, _, _) in FLOODS.items():
            cost = measure(address, process, flood)
            print(
                f"{name:42} {cost.lived_ms:9.1f} {cost.server_cpu_ms:7.1f} {cost.grown_mib:6.1f} "
                f"{cost.neighbour_p99_ms:7.2f}"
            )
        measure_idle(address, process)


if __name__ == "__main__":
    main()
