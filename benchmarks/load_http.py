"""Closed-loop HTTP/1.1 load: C keep-alive connections, each sends again as soon as its answer is complete.

Run as a program: reads a JSON job on standard input, prints a JSON `LoadResult` on standard output. It
speaks raw HTTP on asyncio so that the client is cheap beside the servers it measures.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from typing import cast

from benchmarks.load import summarise

_LAST_CHUNK = b"\r\n0\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One connection of the closed loop. Stops sending once `run.deadline` has passed."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.buffer = bytearray()
        self.expected = -1
        self.sent_at = 0.0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write like asyncio.Transport without inheriting from it.
        self.transport = cast(asyncio.Transport, transport)
        self.send()

    def send(self) -> None:
        assert self.transport is not None, "connected"
        self.sent_at = time.perf_counter()
        self.transport.write(self.run.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.expected < 0:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self.expected = _expected(bytes(self.buffer[:end]))
        if not (self.buffer.endswith(_LAST_CHUNK) if self.expected == 0 else len(self.buffer) >= self.expected):
            return
        now = time.perf_counter()
        self.run.record(now, now - self.sent_at, is_ok=self.buffer[9:12] == b"200")
        self.buffer.clear()
        self.expected = -1
        if now < self.run.deadline:
            self.send()
        else:
            self.close()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.run.connection_ended()


def _expected(head: bytes) -> int:
    """The length of an answer with this head, blank line and body included; 0 for a body in chunks."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(head) + 4 + int(line[15:])
        if line.startswith(b"transfer-encoding:"):
            return 0
    raise SystemExit(f"the answer has neither Content-Length nor Transfer-Encoding: {head!r}")


class _Run:
    def __init__(self, request: bytes, concurrency: int, warmup_s: float, seconds: float) -> None:
        self.request = request
        self.started = time.perf_counter() + warmup_s
        self.deadline = self.started + seconds
        self.latencies: list[float] = []
        self.failed = 0
        self.last = self.started
        self.open = concurrency
        self.done = asyncio.get_running_loop().create_future()

    def record(self, now: float, latency: float, *, is_ok: bool) -> None:
        if now < self.started:
            return
        self.last = now
        if is_ok:
            self.latencies.append(latency)
        else:
            self.failed += 1

    def connection_ended(self) -> None:
        self.open -= 1
        if self.open == 0:
            self.done.set_result(None)


async def _main(job: dict[str, object]) -> None:
    body = base64.b64decode(str(job["body"]))
    headers = dict(job["headers"])  # type: ignore[call-overload]
    head = [f"POST {job['path']} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    request = ("\r\n".join(head) + "\r\n\r\n").encode() + body
    concurrency = int(str(job["concurrency"]))
    run = _Run(request, concurrency, float(str(job["warmup_s"])), float(str(job["seconds"])))
    loop = asyncio.get_running_loop()
    for _ in range(concurrency):
        await loop.create_connection(lambda: _Connection(run), "127.0.0.1", int(str(job["port"])))
    await run.done
    print(json.dumps(summarise(run.latencies, run.failed, run.last - run.started)))


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.run(_main(json.load(sys.stdin)))
    except ImportError:
        asyncio.run(_main(json.load(sys.stdin)))
