"""A front process: serves the connections that the core passes to it, and exits when the core says so."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

from modelserver.core.interpreter import keep_for_good, shorten_switch_interval, tune_malloc
from modelserver.execution.process.child import ProcessMain
from modelserver.execution.process.child_log import ChildLogHandler
from modelserver.telemetry.log_settings import set_own_level
from modelserver.telemetry.wire_counts import WireCounts
from modelserver.wire.acceptor import AcceptedSocket
from modelserver.wire.http1.connection import Http1Connection
from modelserver.wire.http2.connection import Http2Connection
from modelserver.wire.port import NoHttp, Port
from modelserver.wire.processes.counts import CountsReader
from modelserver.wire.processes.front_frontends import Core
from modelserver.wire.processes.messages import Report
from modelserver.wire.processes.setup import FrontSetup

# Between two checks whether there is news to report, with and without open connections.
_LOOK_S: Final = 0.1
_IDLE_LOOK_S: Final = 1.0
# Reports are also sent without news, so that the core knows that this process does not hang.
_SILENCE_S: Final = 5.0
# Without a request in flight, before memory goes back to the system.
_IDLE_S: Final = 15.0
_POLL_S: Final = 0.005
_LAST_WORDS_S: Final = 1.0
# Connections taken over in one turn of the loop.
_MAX_RECEIVED: Final = 64


def create(*, setup: dict[str, Any], descriptors: list[int]) -> Front:
    """Called in the child process: a front that is ready. Raises ServerError when its files are invalid."""
    return Front(FrontSetup.from_arguments(setup), descriptors)


class Front(ProcessMain):
    """The whole work of the process, on one event loop. The core waits for the constructor; then `run` serves."""

    def __init__(self, setup: FrontSetup, descriptors: Sequence[int]) -> None:
        """`descriptors` are those of `FrontSockets`."""
        _log_to_core(setup.log_level)
        tune_malloc()
        shorten_switch_interval()
        self._setup = setup
        self._num_received = 0
        self._runner = asyncio.Runner(loop_factory=_loop_factory(setup.loop))
        self._runner.run(self._build(descriptors))

    async def _build(self, descriptors: Sequence[int]) -> None:
        link, handover, outgoing, incoming = descriptors
        self._end: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._handover = socket.socket(fileno=handover)
        self._handover.setblocking(False)
        self._core = core = Core(
            (link, outgoing, incoming),
            self._setup.http_limits,
            self._setup.grpc_limits,
            self._setup.calls,
            drain=self._finish,
            retire=self._retire,
        )
        self._counts = [WireCounts() for _ in self._setup.ports]
        self._readers = [CountsReader(counts) for counts in self._counts]
        self._ports = [
            Port(
                port.name,
                http=core.http if port.has_http else NoHttp(),
                grpc=core.grpc if port.has_grpc else None,
                limits=port.limits,
                counts=counts,
                http1=Http1Connection,
                http2=Http2Connection,
                tls=port.tls,
            )
            for port, counts in zip(self._setup.ports, self._counts, strict=True)
        ]
        for port in self._ports:
            # One process, one loop: all its connections read into the same memory.
            port.context.arena = self._ports[0].context.arena
            port.context.assembly = self._ports[0].context.assembly

    def run(self) -> int:
        keep_for_good()
        with self._runner:
            self._runner.run(self._serve())
        return 0

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._handover, self._take_connections)
        reporter = loop.create_task(self._keep_reporting())
        for port in self._ports:
            port.start()
        grace_s = await self._end
        self._take_rest()
        loop.remove_reader(self._handover)
        await asyncio.gather(*(port.stop(grace_s) for port in self._ports))
        reporter.cancel()
        await asyncio.gather(reporter, return_exceptions=True)
        self._report()
        await _until(lambda: self._core.link.is_empty, _LAST_WORDS_S)
        self._core.link.close()
        self._handover.close()

    def _take_connections(self) -> None:
        for _ in range(_MAX_RECEIVED):
            if not self._take_connection():
                return

    def _take_rest(self) -> None:
        """Take the connections that were dealt before the core announced the end."""
        while self._take_connection():
            pass

    def _take_connection(self) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._handover, 1, 1)
        except BlockingIOError:
            return False
        if not descriptors:  # the core has closed its end
            self._finish(0.0)
            return False
        self._num_received += 1
        connection = AcceptedSocket(fileno=descriptors[0])
        connection.setblocking(False)
        self._ports[data[0]].take(connection)
        return True

    def _retire(self) -> None:
        for port in self._ports:
            port.retire()

    def _finish(self, grace_s: float) -> None:
        if not self._end.done():
            self._end.set_result(grace_s)

    # Reports to the core.

    async def _keep_reporting(self) -> None:
        loop = asyncio.get_running_loop()
        reported: object = None
        reported_s = busy_s = loop.time()
        while True:
            now_s = loop.time()
            state = self._state()
            if state != reported or now_s - reported_s >= _SILENCE_S:
                self._report()
                reported, reported_s = state, now_s
            self._core.link.tidy()
            if self._core.num_inflight:
                busy_s = now_s
            elif now_s - busy_s >= _IDLE_S:
                self._core.link.trim()
                busy_s = now_s
            await asyncio.sleep(_LOOK_S if self._num_open else _IDLE_LOOK_S)

    def _state(self) -> tuple[object, ...]:
        """The state that reports describe; equal as long as there is no news."""
        counts = [(c.connections_opened.total(), c.open_streams, c.violations.total()) for c in self._counts]
        return self._num_received, self._num_open, *counts

    @property
    def _num_open(self) -> int:
        return sum(port.num_connections for port in self._ports)

    def _report(self) -> None:
        self._core.link.send(Report(self._num_received, self._num_open, [reader.growth() for reader in self._readers]))


def _log_to_core(level: int) -> None:
    handler = ChildLogHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_own_level(level)


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The kind of loop that the core runs on; None is asyncio's own."""
    if name != "uvloop":
        return None
    import uvloop

    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not condition() and loop.time() < deadline_s:  # noqa: ASYNC110 - a backlog has no waiters
        await asyncio.sleep(_POLL_S)
