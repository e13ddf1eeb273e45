"""The core's side of one front process, from its start to its end: its requests and its state."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from modelserver.telemetry.wire_counts import WireCounts
from modelserver.wire.processes.core_inference import RemoteRequests
from modelserver.wire.processes.counts import CountsShare
from modelserver.wire.processes.exchanges import ForwardedExchanges
from modelserver.wire.processes.link import Link
from modelserver.wire.processes.messages import (
    Cancel,
    Credit,
    Drain,
    Exchange,
    FrontBundle,
    HalfClose,
    Infer,
    LogLevel,
    Open,
    Piece,
    Report,
    Retire,
    ShortCall,
    ShortExchange,
    Unary,
)
from modelserver.wire.processes.setup import CorePlanes, FrontSockets
from modelserver.wire.processes.short_exchanges import ShortExchanges


class FrontSession:
    """Answers a front and deals connections to it. Event loop thread only.

    `has_room` and `num_connections` are what a dealer looks at. `close` is called when the process has ended.
    """

    def __init__(
        self,
        name: str,
        sockets: FrontSockets,
        planes: CorePlanes,
        *,
        counts: Sequence[WireCounts],
        lost: Callable[[FrontSession], None],
    ) -> None:
        """`counts` has an entry per port. `lost` is called once when the front hangs up before `close`."""
        self.name = name
        self._handover = sockets.handover
        self._link = Link(
            name,
            sockets.link,
            sockets.to_front,
            sockets.from_front,
            kind=FrontBundle,
            receive=self._receive,
            lost=lambda: lost(self),
        )
        self._inference = RemoteRequests(planes.dataplane, self._link, is_on=planes.recognizes)
        self._short = ShortExchanges(planes.http, planes.grpc, self._link, is_on=planes.recognizes)
        self._exchanges = ForwardedExchanges(planes.http, planes.grpc, self._link)
        self._counts = [CountsShare(each) for each in counts]
        self._num_dealt = 0
        self._num_received = 0
        self._num_open = 0
        self._has_spoken = True
        self._silent_since_s = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Infer: self._inference.infer,
            ShortCall: self._short.call,
            ShortExchange: self._short.exchange,
            Cancel: self._cancel,
            Exchange: self._exchanges.exchange,
            Unary: self._exchanges.unary,
            Open: self._exchanges.open,
            Piece: self._exchanges.piece,
            HalfClose: self._exchanges.piece,
            Credit: self._credit,
            Report: self._report,
        }

    @property
    def num_connections(self) -> int:
        """The front's connections, and those on their way to it."""
        return self._num_open + self._num_dealt - self._num_received

    @property
    def num_inflight(self) -> int:
        """Inference requests that are not answered."""
        return self._inference.num_inflight + self._short.num_inflight

    def deal(self, port_index: int, connection: socket.socket) -> bool:
        """Give a connection to the front, and close it here; False when it takes none now. Then the caller keeps it."""
        try:
            socket.send_fds(self._handover, [bytes((port_index,))], [connection.fileno()])
        except OSError:  # its queue is full, or it is about to be found dead
            return False
        connection.close()
        self._num_dealt += 1
        return True

    def retire(self) -> None:
        """Have clients go elsewhere with their next requests."""
        self._link.send(Retire())

    def drain(self, grace_s: float) -> None:
        """Have the front finish what is in flight, for `grace_s` at most, and exit."""
        self._link.send(Drain(grace_s))

    def set_log_level(self, level: int) -> None:
        """Have the front log from this level on."""
        self._link.send(LogLevel(level))

    def silence_s(self, now_s: float) -> float:
        """How long the front, which reports every few seconds, has sent nothing; called about once a second."""
        self._link.tidy()
        if self._has_spoken:
            self._has_spoken = False
            self._silent_since_s = now_s
        return now_s - self._silent_since_s

    def close(self) -> None:
        """The front is gone: cancel all that its clients were waiting for. Safe to repeat."""
        self._link.close()
        self._handover.close()
        self._inference.close()
        self._short.close()
        self._exchanges.close()
        for share in self._counts:
            share.withdraw()

    def _receive(self, messages: Sequence[Any]) -> None:
        self._has_spoken = True
        handlers = self._handlers
        for message in messages:
            handlers[type(message)](message)

    def _cancel(self, message: Cancel) -> None:
        if not (self._inference.cancel(message.call) or self._short.cancel(message.call)):
            self._exchanges.cancel(message.call)

    def _credit(self, message: Credit) -> None:
        if not self._inference.credit(message):
            self._exchanges.credit(message)

    def _report(self, report: Report) -> None:
        self._num_received = report.num_received
        self._num_open = report.num_open
        for share, growth in zip(self._counts, report.counts, strict=True):
            share.add(growth)
