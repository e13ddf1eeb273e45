"""Closed-loop gRPC load through grpc.aio: C calls in flight over a few channels, messages sent as given.

Run as a program: reads a JSON job on standard input, prints a JSON `LoadResult` on standard output.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time

import grpc

from benchmarks.load import summarise

_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


async def _main(job: dict[str, object]) -> None:
    message = base64.b64decode(str(job["body"]))
    concurrency = int(str(job["concurrency"]))
    started = time.perf_counter() + float(str(job["warmup_s"]))
    deadline = started + float(str(job["seconds"]))
    latencies: list[float] = []
    failed = 0
    last = started

    async def caller(call: grpc.aio.UnaryUnaryMultiCallable) -> None:
        nonlocal failed, last
        while True:
            sent = time.perf_counter()
            if sent >= deadline:
                return
            try:
                await call(message)
                is_ok = True
            except grpc.aio.AioRpcError:
                is_ok = False
            now = time.perf_counter()
            if now >= started:
                last = now
                if is_ok:
                    latencies.append(now - sent)
                else:
                    failed += 1

    channels = [
        grpc.aio.insecure_channel(
            f"127.0.0.1:{job['port']}", options=[*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        )
        for _ in range(int(str(job["connections"])))
    ]
    calls = [channel.unary_unary(str(job["path"])) for channel in channels]
    await asyncio.gather(*(caller(calls[index % len(calls)]) for index in range(concurrency)))
    for channel in channels:
        await channel.close()
    print(json.dumps(summarise(latencies, failed, last - started)))


if __name__ == "__main__":
    asyncio.run(_main(json.load(sys.stdin)))
