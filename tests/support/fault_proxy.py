"""A TCP proxy that a test lets fail: it can refuse, reset, or swallow everything as a broken network does."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


class Fault(enum.Enum):
    """What happens to connections, those that are open included."""

    NONE = "none"
    # Nothing passes, and nothing is closed.
    SWALLOW = "swallow"
    # What is open is reset, and what comes is refused.
    REFUSE = "refuse"


class FaultProxy:
    """Stands before `target`, HOST:PORT. Its methods may be called from any thread."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.num_connections = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def fail(self, fault: Fault) -> None:
        self._run(self._apply(fault))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _apply(self, fault: Fault) -> None:
        if fault is Fault.SWALLOW:
            self._flows.clear()
            return
        self._flows.set()
        if fault is Fault.REFUSE:
            if self._server is not None:
                self._server.close()
                self._server = None
            for writer in list(self._writers):
                if not writer.is_closing():
                    raw = writer.get_extra_info("socket")
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                writer.transport.abort()
            self._writers.clear()
        elif self._server is None:
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            await self._flows.wait()
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._writers.add(far_writer)
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        except OSError:
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _close(self) -> None:
        await self._apply(Fault.REFUSE)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()


@contextmanager
def fault_proxy(target: str) -> Iterator[FaultProxy]:
    proxy = FaultProxy(target)
    thread = threading.Thread(target=proxy._serve, name="fault-proxy")
    thread.start()
    try:
        proxy._run(proxy._listen())
        proxy.fail(Fault.NONE)
        yield proxy
    finally:
        proxy._run(proxy._close())
        proxy._loop.call_soon_threadsafe(proxy._loop.stop)
        thread.join(10)
