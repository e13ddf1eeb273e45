"""Ports served by front processes over echo models, in a thread with a loop of its own, and a client."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from support.echo import EchoControlPlane, EchoModel, echo_dataplane
from support.wires import HOST, LOOPS, PATIENCE_S, running_loop

from modelserver.app.frontends import grpc_frontend, http_frontend
from modelserver.telemetry.wire_counts import FrontGauges, WireCounts
from modelserver.wire.address import Address
from modelserver.wire.limits import WireLimits
from modelserver.wire.native_server import NativeServer
from modelserver.wire.processes.front_process import FrontOptions
from modelserver.wire.processes.server import FrontPort, WireProcesses
from modelserver.wire.processes.setup import CorePlanes
from modelserver.wire.tls import TlsFiles

Result = TypeVar("Result")


class Fronted:
    """A core with its fronts (`processes`), and the same served without them (`alone`)."""

    def __init__(
        self,
        models: Sequence[EchoModel],
        loop: asyncio.AbstractEventLoop,
        *,
        num_fronts: int = 2,
        limits: WireLimits | None = None,
        tls: TlsFiles | None = None,
        options: FrontOptions | None = None,
    ) -> None:
        self.loop = loop
        self.models = {model.name: model for model in models}
        self.control = EchoControlPlane()
        self.counts = WireCounts()
        dataplane = echo_dataplane(*models)
        planes: Any = self.control
        self.dataplane = dataplane
        self.http = http_frontend(dataplane, planes)
        self.grpc = grpc_frontend(dataplane, planes, health_watch_interval_s=0.01)
        port = FrontPort(Address(HOST, 0), limits=limits or WireLimits(), tls=tls, counts=self.counts)
        self.processes = WireProcesses(
            num_fronts, [port, port], CorePlanes(dataplane, self.http, self.grpc, self.http.apis), options=options
        )
        self.alone = NativeServer(Address(HOST, 0), http=self.http, grpc=self.grpc, limits=limits)

    @property
    def port(self) -> int:
        return self.processes.wires[0].port

    @property
    def url(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def gauges(self) -> list[FrontGauges]:
        return self.call(self.processes.gauges)

    def call(self, function: Callable[[], Result | Awaitable[Result]]) -> Result:
        """Run `function` on the core's loop, awaiting what it returns if need be."""

        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Return when `holds`. Fails, naming `what`, when that takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain until {what}: {self.gauges}"
            time.sleep(0.005)


@contextmanager
def fronted(*models: EchoModel, loop: str = "uvloop", **details: Any) -> Iterator[Fronted]:
    """Serve until the block ends. `details` are those of `Fronted`."""
    event_loop = LOOPS[loop]()
    with running_loop(event_loop):
        made = Fronted(models or (EchoModel(),), event_loop, **details)
        made.call(made.processes.start)
        made.call(made.alone.start)
        try:
            yield made
        finally:
            made.call(lambda: made.processes.stop(1.0))
            made.call(lambda: made.alone.stop(1.0))


class Client:
    """One HTTP/1.1 connection. Raises ConnectionError or IncompleteReadError when it is lost."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.num_answered = 0

    @classmethod
    async def connect(cls, port: int, tls: ssl.SSLContext | None = None) -> Client:
        return cls(*await asyncio.open_connection(HOST, port, ssl=tls))

    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Sequence[str] = ()
    ) -> tuple[int, dict[str, str], bytes]:
        self.send(method, path, body, headers)
        return await self.answer()

    def send(self, method: str, path: str, body: bytes = b"", headers: Sequence[str] = ()) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
        self._writer.write("\r\n".join(lines).encode() + body)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(PATIENCE_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        self.num_answered += 1
        return int(head[0].split()[1]), headers, body

    async def infer(self, values: Any, model: str = "echo") -> np.ndarray[Any, Any]:
        """Send an FP32 tensor as binary data, take it back, and check that it is the same."""
        self.send_infer(values, model)
        return await self.inferred()

    def send_infer(self, values: Any, model: str = "echo") -> None:
        data = np.asarray(values, np.float32)
        tensor = {
            "name": "INPUT",
            "datatype": "FP32",
            "shape": list(data.shape),
            "parameters": {"binary_data_size": data.nbytes},
        }
        wanted = {"name": "OUTPUT", "parameters": {"binary_data": True}}
        head = json.dumps({"inputs": [tensor], "outputs": [wanted]}).encode()
        length = f"Inference-Header-Content-Length: {len(head)}"
        self.send("POST", f"/v2/models/{model}/infer", head + data.tobytes(), [length])

    async def inferred(self) -> np.ndarray[Any, Any]:
        status, headers, body = await self.answer()
        assert status == 200, body
        return np.frombuffer(body[int(headers["inference-header-content-length"]) :], np.float32)

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except (ConnectionError, ssl.SSLError):
            return  # it was lost before
