"""Ports that several front processes serve: this process listens, and the fronts do the rest."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from modelserver.protocol.limits import GrpcLimits, HttpLimits
from modelserver.telemetry.wire_counts import FrontGauges, WireCounts
from modelserver.wire.acceptor import Acceptor
from modelserver.wire.address import Address, authority
from modelserver.wire.limits import WireLimits
from modelserver.wire.processes.front_process import FrontOptions, FrontProcess
from modelserver.wire.processes.session import FrontSession
from modelserver.wire.processes.setup import CorePlanes, FrontSetup, FrontSockets, PortSetup
from modelserver.wire.tls import TlsFiles, TlsReloader


class Dealer:
    """Holds the fronts that serve. Event loop thread only.

    `changed` is called when the first front was added or the last one removed.
    """

    def __init__(self, changed: Callable[[bool], None]) -> None:
        self._changed = changed
        self._sessions: list[FrontSession] = []

    @property
    def sessions(self) -> list[FrontSession]:
        """The fronts that serve now."""
        return self._sessions

    def add(self, session: FrontSession) -> None:
        """Deal to this front from now on."""
        self._sessions.append(session)
        if len(self._sessions) == 1:
            self._changed(True)

    def remove(self, session: FrontSession) -> None:
        """Stop dealing to this front; does nothing if it is not here."""
        if session in self._sessions:
            self._sessions.remove(session)
            if not self._sessions:
                self._changed(False)

    def deal(self, port_index: int, accepted: socket.socket) -> None:
        """Deal a connection. If no front takes it, which means that all hang, it is closed."""
        for session in sorted(self._sessions, key=_load):
            if session.deal(port_index, accepted):
                return
        _logger.error("closed a new connection: no front process takes it")
        accepted.close()


def _load(session: FrontSession) -> int:
    return session.num_connections


_logger = logging.getLogger(__name__)

_TIDY_S: Final = 1.0
# Extra time after the grace period for a front that was told to exit: it cuts the remaining requests, and ends.
_EXIT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class FrontPort:
    """The description of a port of `WireProcesses`.

    `counts` may be shared by the ports of a server; `name` is the port's name in the log.
    """

    address: Address
    has_http: bool = True
    has_grpc: bool = True
    limits: WireLimits = field(default_factory=WireLimits)
    tls: TlsFiles | None = None
    counts: WireCounts = field(default_factory=WireCounts)
    name: str = "HTTP and gRPC"


class WireProcesses:
    """Serves `ports` by `num_fronts` processes from `start` to `stop`. Made and used on one event loop."""

    def __init__(
        self,
        num_fronts: int,
        ports: Sequence[FrontPort],
        planes: CorePlanes,
        *,
        http_limits: HttpLimits | None = None,
        grpc_limits: GrpcLimits | None = None,
        log_level: int = logging.INFO,
        options: FrontOptions | None = None,
    ) -> None:
        """`log_level` is that of the server's own log."""
        assert num_fronts >= 1, f"there is at least one front, got {num_fronts}"
        self._ports = list(ports)
        self._num_fronts = num_fronts
        self._planes = planes
        self._http_limits = http_limits or HttpLimits()
        self._grpc_limits = grpc_limits or GrpcLimits()
        self._log_level = self._set_up_level = log_level
        self._options = options or FrontOptions()
        self._dealer = Dealer(self._pause_accepting)
        self._fronts: list[FrontProcess] = []
        self._sessions: dict[FrontProcess, FrontSession] = {}
        self._acceptors: list[Acceptor] = []
        # The fronts read the files themselves; reading them here fails sooner and feeds the metrics.
        self._tls: list[TlsReloader] = []
        self._tidier: asyncio.TimerHandle | None = None
        self._is_listening = False
        self._is_retiring = False
        self._is_stopping = False

    @property
    def wires(self) -> tuple[FrontedPort, ...]:
        """The ports, in the order in which they were given."""
        return tuple(FrontedPort(self, index) for index in range(len(self._ports)))

    def port_of(self, index: int) -> int:
        """The port that is listened on; the real one when 0 was asked for."""
        return self._ports[index].address.port

    async def start(self) -> None:
        """Listen, start the fronts and wait until all serve.

        Raises UnavailableError, naming the flag, when an address cannot be had, InvalidArgumentError when a file of a
        certificate cannot be used, or the ServerError that kept a front from starting; then `stop` need not be called.
        Does nothing once it is started.
        """
        if self._is_listening:
            return
        self._tls = [TlsReloader(port.tls, port.counts.reloads) for port in self._ports if port.tls is not None]
        loop = asyncio.get_running_loop()
        bound = []
        try:
            for index, port in enumerate(self._ports):
                bound.append(port.address.bind())
                address = replace(port.address, port=bound[-1].getsockname()[1])
                self._ports[index] = replace(port, address=address)
            self._acceptors = [
                Acceptor(loop, each, partial(self._dealer.deal, index)) for index, each in enumerate(bound)
            ]
            setup = self._setup().share(self._num_fronts)
            self._fronts = [
                FrontProcess(f"wire-{number}", setup, self._options, up=self._add, down=self._remove)
                for number in range(self._num_fronts)
            ]
            await self._start_fronts()
        except BaseException:
            for each in bound:
                each.close()
            await self._stop_fronts(0.0)
            raise
        self._is_listening = True
        for acceptor in self._acceptors:
            acceptor.start()
        self._pause_accepting(bool(self._dealer.sessions))
        self._tidier = loop.call_later(_TIDY_S, self._tidy)
        for port in self._ports:
            _logger.info(
                "%s listens on %s%s, served by %d processes",
                port.name,
                authority(port.address.host, port.address.port),
                " with TLS" if port.tls is not None else "",
                self._num_fronts,
            )

    def retire(self) -> None:
        """Serve requests, and let answers tell clients, where the protocol can, to send the next ones elsewhere."""
        self._is_retiring = True
        for session in self._sessions.values():
            session.retire()

    async def stop(self, grace_s: float) -> None:
        """Accept no more, give requests in flight `grace_s` seconds to finish, then cut the rest.

        Waits for the same end when called again; cancelling it ends the fronts at once.
        """
        if not self._is_listening:
            await asyncio.gather(*(front.stop(grace_s + _EXIT_S) for front in self._fronts))
            return
        self._is_listening, self._is_stopping = False, True
        acceptors, self._acceptors = self._acceptors, []
        for acceptor in acceptors:
            acceptor.close()
        if self._tidier is not None:
            self._tidier.cancel()
        for front in self._fronts:
            front.expect_end()
        if self._planes.grpc is not None:
            self._planes.grpc.drain()
        for session in self._sessions.values():
            session.drain(grace_s)
        await self._stop_fronts(grace_s + _EXIT_S)

    def gauges(self) -> list[FrontGauges]:
        """Gauges of each front, in order; a front that is being restarted has few."""
        return [_gauges(front, self._sessions.get(front)) for front in self._fronts]

    def _setup(self) -> FrontSetup:
        kind = "uvloop" if type(asyncio.get_running_loop()).__module__.partition(".")[0] == "uvloop" else "asyncio"
        ports = [
            PortSetup(
                f"{port.name} on {authority(port.address.host, port.address.port)}",
                has_http=port.has_http,
                has_grpc=port.has_grpc,
                limits=port.limits,
                tls=port.tls,
            )
            for port in self._ports
        ]
        return FrontSetup(
            tuple(ports), self._http_limits, self._grpc_limits, self._planes.calls(), kind, self._set_up_level
        )

    async def _start_fronts(self) -> None:
        tasks = [asyncio.ensure_future(front.start()) for front in self._fronts]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop_fronts(self, timeout_s: float) -> None:
        were_killed = await asyncio.gather(*(front.stop(timeout_s) for front in self._fronts))
        for front, was_killed in zip(self._fronts, were_killed, strict=True):
            if was_killed and timeout_s:
                _logger.error("%s did not exit within %.1f s and was killed", front.name, timeout_s)
        for front in list(self._sessions):
            self._remove(front)
        self._fronts = []

    def _add(self, front: FrontProcess, sockets: FrontSockets) -> None:
        session = FrontSession(
            front.name,
            sockets,
            self._planes,
            counts=[port.counts for port in self._ports],
            lost=self._dealer.remove,
        )
        self._sessions[front] = session
        if self._log_level != self._set_up_level:
            session.set_log_level(self._log_level)
        if self._is_retiring:
            session.retire()
        if self._is_stopping:
            session.drain(0.0)
        else:
            self._dealer.add(session)

    def set_log_level(self, level: int) -> None:
        """Set the log level of the fronts, including those that are started later."""
        self._log_level = level
        for session in self._sessions.values():
            session.set_log_level(level)

    def _remove(self, front: FrontProcess) -> None:
        session = self._sessions.pop(front, None)
        if session is not None:
            self._dealer.remove(session)
            session.close()

    def _pause_accepting(self, has_fronts: bool) -> None:
        """While no front serves, new connections wait in the backlog of the system."""
        if not self._is_listening:
            return
        for acceptor in self._acceptors:
            if has_fronts:
                acceptor.resume()
            else:
                acceptor.pause()

    def _tidy(self) -> None:
        self._tidier = asyncio.get_running_loop().call_later(_TIDY_S, self._tidy)
        for tls in self._tls:
            tls.look()
        now_s = asyncio.get_running_loop().time()
        for front, session in self._sessions.items():
            if session.silence_s(now_s) > self._options.max_silence_s:
                _logger.error("%s hangs: it sent nothing for %.1f s; killing it", front.name, session.silence_s(now_s))
                front.kill()


class FrontedPort:
    """One port of `WireProcesses` as its users see any port. Ports of the same processes start and stop together."""

    def __init__(self, processes: WireProcesses, index: int) -> None:
        self.processes = processes
        self._index = index

    @property
    def port(self) -> int:
        """The port that is listened on; the real one when 0 was asked for."""
        return self.processes.port_of(self._index)

    async def start(self) -> None:
        """As `WireProcesses.start`."""
        await self.processes.start()

    def retire(self) -> None:
        """As `WireProcesses.retire`."""
        self.processes.retire()

    async def stop(self, grace_s: float) -> None:
        """As `WireProcesses.stop`."""
        await self.processes.stop(grace_s)


def _gauges(front: FrontProcess, session: FrontSession | None) -> FrontGauges:
    return FrontGauges(
        front.name,
        front.pid,
        session is not None,
        session.num_connections if session is not None else 0,
        session.num_inflight if session is not None else 0,
        front.num_restarts,
    )
