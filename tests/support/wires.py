"""A port of one of the wires with small handlers behind it, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvloop
from support.wire_frontends import GrpcExamples, HttpExamples

from modelserver.telemetry.wire_counts import Protocol, WireCounts
from modelserver.wire.address import Address
from modelserver.wire.context import WireContext
from modelserver.wire.limits import WireLimits
from modelserver.wire.native_server import NativeServer
from modelserver.wire.reference.grpcio_server import GrpcioServer
from modelserver.wire.tls import TlsFiles

Result = TypeVar("Result")

HOST = "127.0.0.1"
PATIENCE_S = 60.0
# Longer than connections linger after their last word.
_LINGER_S = 2.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


class RunningWire:
    """A port that listens: where, its handlers, and what it has counted."""

    def __init__(self, server: Any, counts: WireCounts, handlers: Handlers) -> None:
        self.server = server
        self.counts = counts
        self.grpc, self.http, self.loop = handlers.grpc, handlers.http, handlers.loop

    @property
    def is_reference(self) -> bool:
        """It is grpcio's, which serves gRPC only and counts nothing."""
        return isinstance(self.server, GrpcioServer)

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.server.port

    @property
    def url(self) -> str:
        return f"{HOST}:{self.server.port}"

    def call(self, function: Callable[[], Result | Awaitable[Result]]) -> Result:
        """Run `function` on the loop of the port, awaiting what it returns if need be."""

        async def run() -> Any:
            result = function()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def release(self) -> None:
        """Let all calls and requests go that are held."""
        self.call(self.grpc.release)
        self.call(self.http.release)

    def pass_time(self, seconds: float) -> None:
        """Have the port look after its connections now, and as if `seconds` later."""

        def sweep() -> None:
            now_s = self.loop.time()
            for at_s in (now_s, now_s + seconds):
                for connection in list(self.context.connections):
                    connection.sweep(at_s)

        self.call(sweep)

    @property
    def context(self) -> WireContext:
        """What the connections of our own wire share."""
        found: WireContext = self.server._port.context
        return found

    def violations(self, reason: str) -> int:
        """How often peers were ended for this reason, over whichever protocol."""
        return sum(count for (_, violation), count in self.counts.violations.items() if violation.value == reason)

    @property
    def all_violations(self) -> dict[str, int]:
        return {violation.value: count for (_, violation), count in self.counts.violations.items() if count}

    def open_connections(self) -> int:
        return sum(self.counts.connections_open[protocol] for protocol in Protocol)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Return when `holds`. Fails, naming `what`, when that takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain until {what}; {self._state()}"
            time.sleep(0.001)

    def expect_idle(self) -> None:
        """Nothing is left of the clients that came: no connection, no stream, no call."""
        if not self.is_reference:
            self.pass_time(_LINGER_S)
        self.until(lambda: self.open_connections() == 0, "all connections were closed")
        assert self.counts.open_streams == 0, self._state()
        assert not self.grpc.held, self._state()
        assert not self.http.held, self._state()
        self.until(lambda: self.grpc.num_streams == 0, "all streaming calls ended")

    def _state(self) -> str:
        return (
            f"{self.open_connections()} connections, {self.counts.open_streams} streams, "
            f"{len(self.grpc.held)} held calls, {len(self.http.held)} held requests, "
            f"{self.grpc.num_streams} streaming calls; {self.all_violations}"
        )


class Handlers:
    """What a wire serves, and on which loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.grpc = GrpcExamples()
        self.http = HttpExamples()
        self.loop = loop


@contextmanager
def running_wire(
    kind: str = "native",
    *,
    limits: WireLimits | None = None,
    loop: str = "asyncio",
    tls: TlsFiles | None = None,
) -> Iterator[RunningWire]:
    """Listen until the block ends. `kind` is "native", or "grpcio" for the reference, which serves gRPC only."""
    handlers = Handlers(LOOPS[loop]())
    counts = WireCounts()
    server: Any
    if kind == "native":
        server = NativeServer(
            Address(HOST, 0), http=handlers.http, grpc=handlers.grpc, limits=limits, counts=counts, tls=tls
        )
    else:
        server = GrpcioServer(handlers.grpc, Address(HOST, 0), limits)
    with running_loop(handlers.loop):
        running = RunningWire(server, counts, handlers)
        running.call(server.start)
        try:
            yield running
        finally:
            running.call(lambda: server.stop(1.0))


@contextmanager
def running_loop(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Run `loop` in a thread until the block ends. What it logs as an error that nobody handled fails the block."""
    errors: list[str] = []
    loop.set_exception_handler(lambda _loop, context: errors.append(str(context)))
    thread = threading.Thread(target=_run, args=(loop,), name="test-wire")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the loop's thread did not end"
    assert not errors, f"the loop caught: {errors}"


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
