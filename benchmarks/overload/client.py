"""Clients that send at a rate, whatever comes back, and count what came back in time."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from modelserver.pb import grpc_service_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelInfer"
REFUSED = ("503", "429", "UNAVAILABLE", "RESOURCE_EXHAUSTED")


@dataclass(slots=True)
class Outcome:
    """Of the requests of one run: latencies of those that were answered in time, and the number of all others."""

    num_sent: int = 0
    in_time_s: list[float] = field(default_factory=list)
    num_late: int = 0
    num_refused: int = 0
    refusal_s: list[float] = field(default_factory=list)
    other: dict[str, int] = field(default_factory=dict)

    def note(self, status: str, took_s: float, deadline_s: float) -> None:
        if status in ("200", "OK"):
            if took_s <= deadline_s:
                self.in_time_s.append(took_s)
            else:
                self.num_late += 1
        elif status in REFUSED:
            self.num_refused += 1
            self.refusal_s.append(took_s)
        elif status in ("504", "DEADLINE_EXCEEDED", "gave up"):
            self.num_late += 1
        else:
            self.other[status] = self.other.get(status, 0) + 1


Send = Callable[[], Awaitable[str]]


async def offer(send: Send, *, rate: float, seconds: float, deadline_s: float, seed: int = 1) -> Outcome:
    """Send at random times, `rate` per second in the mean; returns when all are answered."""
    chance, outcome = random.Random(seed), Outcome()
    tasks: set[asyncio.Task[None]] = set()

    async def one() -> None:
        began_s = time.perf_counter()
        status = await send()
        outcome.note(status, time.perf_counter() - began_s, deadline_s)

    start_s = time.perf_counter()
    due_s = start_s
    while (due_s := due_s + chance.expovariate(rate)) < start_s + seconds:
        pause_s = due_s - time.perf_counter()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        outcome.num_sent += 1
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        await asyncio.wait(tasks)
    return outcome


class HttpClient:
    """HTTP/1.1 over connections that are kept, and closed when the client gives up on an answer."""

    def __init__(self, port: int, model: str, deadline_s: float) -> None:
        tensor = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}
        body = json.dumps({"inputs": [tensor]}).encode()
        self._request = (
            f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
            f"x-envoy-expected-rq-timeout-ms: {round(deadline_s * 1000)}\r\n\r\n"
        ).encode() + body
        self._health = b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n"
        self._port = port
        self._deadline_s = deadline_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def infer(self) -> str:
        return await self._ask(self._request, self._deadline_s)

    async def health(self) -> str:
        return await self._ask(self._health, 10.0)

    async def _ask(self, request: bytes, patience_s: float) -> str:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(patience_s):
                reader, writer = (
                    self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
                )
                writer.write(request)
                status = await _read(reader)
        except TimeoutError:
            if writer is not None:
                writer.close()
            return "gave up"
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            return type(error).__name__
        self._idle.append((reader, writer))
        return status

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)
    return head[9:12].decode()


class GrpcClient:
    """grpcio's, with a deadline on each call."""

    def __init__(self, port: int, model: str, deadline_s: float) -> None:
        data = np.array([[1, 2]], np.int32).tobytes()
        tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="INT32", shape=[1, 2])
        message = pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[data])
        self._message = message.SerializeToString()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._infer: Any = self._channel.unary_unary(METHOD)
        self._ready: Any = self._channel.unary_unary("/inference.GRPCInferenceService/ServerReady")
        self._deadline_s = deadline_s

    async def infer(self) -> str:
        return await self._ask(self._infer, self._message, self._deadline_s)

    async def health(self) -> str:
        return await self._ask(self._ready, b"", 10.0)

    async def _ask(self, call: Any, message: bytes, timeout_s: float) -> str:
        try:
            await call(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"

    async def close(self) -> None:
        await self._channel.close()
