"""The parts that all connections of our own wire share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from modelserver.protocol.call import Frontend as GrpcFrontend
from modelserver.protocol.exchange import Frontend as HttpFrontend
from modelserver.telemetry.wire import WireCounts
from modelserver.wire.arena import Arena
from modelserver.wire.assembly import AssemblyBudget
from modelserver.wire.bulk import BulkTurns
from modelserver.wire.busy_poll import BusyPoll
from modelserver.wire.http2.deadlines import DeadlineWheel
from modelserver.wire.http2.settings import announcement
from modelserver.wire.limits import WireLimits
from modelserver.wire.outbox import Outbox

# The time that a client without requests in flight gets to send one when the server stops: a round trip and a margin.
FIRST_WORDS_S = 0.25
# The message for requests that are given up.
DISMISSAL = "the server is shutting down and gives this request up after --exit-timeout-secs; send it to another one"


class Connection(Protocol):
    """One open connection, as the port that accepted it sees it. Event loop thread only.

    It puts itself into `WireContext.connections` when it is made and takes itself out when it is lost.
    """

    def sweep(self, now_s: float) -> None:
        """Called about once a second with the loop's time: close the connection if its time is up."""

    def retire(self) -> None:
        """Make the next answer the last, if the protocol can say so; continue until then. Safe to repeat."""

    def shutdown(self) -> None:
        """Take no further request; close once the received ones are answered. Safe to repeat."""

    def dismiss(self) -> None:
        """Answer open requests with an error that says they are given up, and close. After `shutdown`."""

    def abort(self) -> None:
        """Close now, regardless of work in progress."""


@dataclass(slots=True)
class WireContext:
    """Made once per port. `http` or `grpc` is None where the port does not serve that protocol."""

    loop: asyncio.AbstractEventLoop
    http: HttpFrontend | None
    grpc: GrpcFrontend | None
    limits: WireLimits
    counts: WireCounts
    outbox: Outbox
    connections: set[Connection] = field(default_factory=set)
    # Several ports may share one of each.
    arena: Arena = field(default_factory=Arena)
    assembly: AssemblyBudget = field(init=False)
    bulk: BulkTurns = field(init=False)
    deadlines: DeadlineWheel = field(init=False)
    busy_poll: BusyPoll = field(init=False)
    # The first bytes that every HTTP/2 connection sends.
    http2_announcement: bytes = field(init=False)
    # Bytes of abandoned answers since their memory was last returned to the system.
    num_given_up_bytes: int = 0
    # Connections end with their next answer, if the protocol can say so.
    is_retiring: bool = False
    # No connection of this port takes further requests.
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.assembly = AssemblyBudget(self.limits.max_assembly_bytes, lambda: self.loop.time())
        self.bulk = BulkTurns(self.loop)
        self.deadlines = DeadlineWheel(self.loop)
        self.busy_poll = BusyPoll(self.loop, self.limits.busy_poll_percent)
        self.http2_announcement = announcement(self.limits)
