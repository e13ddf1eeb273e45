"""An HTTP/1.1 connection without a socket, whose peer a test plays: what it sends, reads, and how long it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from support.memory_transport import MemoryTransport, receive

from modelserver.core.tensor import Buffer
from modelserver.protocol.exchange import HttpExchange, HttpHandler
from modelserver.protocol.response import HttpResponse
from modelserver.telemetry.wire_counts import Protocol, Violation, WireCounts
from modelserver.wire.context import Outbox, WireContext
from modelserver.wire.http1.connection import Http1Connection
from modelserver.wire.limits import TimeLimits, WireLimits

Answer = Callable[[HttpExchange], None]


def path_back(exchange: HttpExchange) -> None:
    """Answers with the path."""
    exchange.respond(HttpResponse(200, [], (exchange.head.path.encode(),)))


def later(_exchange: HttpExchange) -> None:
    """The test answers."""


class DialogueHandler(HttpHandler):
    """Answers by a function; keeps every exchange."""

    def __init__(self, answer: Answer = path_back) -> None:
        self.exchanges: list[HttpExchange] = []
        self.answer = answer

    def handle(self, exchange: HttpExchange) -> None:
        self.exchanges.append(exchange)
        self.answer(exchange)


class PeerTransport(MemoryTransport):
    """Keeps each write, and tells how the connection ended. What `peer_reads` not counts as waiting to be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.ending = ""  # "close", "write_eof" or "abort"
        self.peer_reads = True
        self.num_waiting = 0

    def write(self, data: Buffer) -> None:
        super().write(data)
        self.writes.append(bytes(data))
        if not self.peer_reads:
            self.num_waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def close(self) -> None:
        self.ending = "close"
        super().close()

    def abort(self) -> None:
        self.ending = self.ending if self.ending == "close" else "abort"
        super().abort()

    def write_eof(self) -> None:
        self.ending = "write_eof"  # and it goes on reading


class Dialogue:
    """One connection and its peer. Needs a running loop; time passes only when a test says so."""

    def __init__(self, answer: Answer = path_back, limits: WireLimits | None = None, *, has_http: bool = True) -> None:
        loop = asyncio.get_running_loop()
        self.frontend = DialogueHandler(answer)
        http = self.frontend if has_http else None
        self.context = WireContext(loop, http, None, limits or WireLimits(), WireCounts(), Outbox(loop))
        self.connection = Http1Connection(self.context)
        self.transport = PeerTransport()
        self._now_s = loop.time()

    @property
    def exchanges(self) -> list[HttpExchange]:
        return self.frontend.exchanges

    @property
    def violations(self) -> list[Violation]:
        counted = self.context.counts.violations
        return [violation for (protocol, violation) in counted.elements() if protocol is Protocol.HTTP1]

    def begin(self, data: bytes = b"") -> Dialogue:
        self.connection.begin(self.transport, data)
        return self

    def send(self, data: bytes) -> None:
        """The peer sends; as with a socket, what comes while reading is paused stays outside."""
        assert not self.transport.is_paused, "the connection does not read"
        receive(self.connection, data)

    def take(self) -> bytes:
        """What was written since the last time."""
        written = bytes(self.transport.written)
        self.transport.written.clear()
        self.transport.writes.clear()
        return written

    def wait(self, seconds: float, step_s: float = 1.0) -> None:
        """Time passes, in which the connection is looked at as it would be."""
        end_s = self._now_s + seconds
        while self._now_s < end_s and self.transport.ending != "abort":
            self._now_s += step_s
            self.connection.sweep(self._now_s)

    def lose(self) -> None:
        """The connection is lost."""
        self.transport.is_lost = True
        self.connection.connection_lost(None)


def limits_of(*, times: dict[str, Any] | None = None, **changed: Any) -> WireLimits:
    """The default limits with some of them changed."""
    return replace(WireLimits(), times=replace(TimeLimits(), **(times or {})), **changed)
