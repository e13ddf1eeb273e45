"""The parts that all connections of our own wire share."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from modelserver.protocol.call import GrpcHandler
from modelserver.protocol.exchange import HttpHandler
from modelserver.telemetry.wire_counts import WireCounts
from modelserver.wire.assembly import AssemblyBudget
from modelserver.wire.busy_poll import BusyPoll
from modelserver.wire.http2.deadlines import DeadlineWheel
from modelserver.wire.http2.settings import announcement
from modelserver.wire.limits import WireLimits

# Bytes that a connection may be sent before it waits for its next turn.
TURN_BYTES = 64 * 1024
# Connections served in one turn of the loop: about a millisecond of making, copying and sending.
MAX_TURNS_AT_ONCE = 16


class BulkTurns:
    """Resumes waiting connections, a few in each turn of the loop, in the order of their arrival. Loop thread only."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return when it is the caller's turn, in the loop's next turn at the earliest."""
        turn: asyncio.Future[None] = self._loop.create_future()
        if not self._waiting:
            self._loop.call_soon(self._give)
        self._waiting.append(turn)
        await turn

    def _give(self) -> None:
        num_left = MAX_TURNS_AT_ONCE
        while num_left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                num_left -= 1
        if self._waiting:
            self._loop.call_soon(self._give)


class Flushable(Protocol):
    """A connection with something to send."""

    __slots__ = ()

    def flush(self) -> None:
        """Send the collected data in one write. Does not raise."""


class Outbox:
    """Connections with data to send, flushed at the end of this turn of the loop.

    A connection that answers while it reads flushes itself when it has read all; one that is answered from
    elsewhere (a batch, a timer) calls `add`. Many answers of one turn then leave in one write.
    """

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Flushable] = []

    def add(self, connection: Flushable) -> None:
        """Have `connection` flush soon. The caller must add it only once."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(connection)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.flush()


# The kernel returns up to about this much in one call.
ARENA_BYTES = 320 * 1024


class Arena:
    """Memory that every connection of a loop receives into, so that an idle one owns none.

    All transports, ours and the loops', ask a `BufferedProtocol` for its buffer, fill it and call `buffer_updated` in
    one go, without anything else of the loop running in between. So the receiver must copy the bytes that it wants to
    keep before `buffer_updated` returns: afterwards another connection overwrites them. `view` is what `get_buffer`
    returns; `memory` are the same bytes, for `find` and the like.
    """

    __slots__ = ("memory", "view")

    def __init__(self, num_bytes: int = ARENA_BYTES) -> None:
        self.memory = bytearray(num_bytes)
        self.view = memoryview(self.memory)


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
    http: HttpHandler | None
    grpc: GrpcHandler | None
    limits: WireLimits
    counts: WireCounts
    outbox: Outbox
    connections: set[Connection] = field(default_factory=set)
    # Several ports may share one of each.
    arena: Arena = field(default_factory=Arena)
    assembly: AssemblyBudget = field(init=False)
    refused_peers: RefusedPeers = field(init=False)
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
        self.refused_peers = RefusedPeers(lambda: self.loop.time())
        self.bulk = BulkTurns(self.loop)
        self.deadlines = DeadlineWheel(self.loop)
        self.busy_poll = BusyPoll(self.loop, self.limits.busy_poll_percent)
        self.http2_announcement = announcement(self.limits)


_DROP_UNSENT = struct.pack("ii", 1, 0)


def cut(transport: asyncio.Transport, context: WireContext) -> None:
    """Close at once with a reset, so that the peer knows; the system drops its unsent data.

    After a plain close the system would try to send the rest for minutes, and the peer would believe it is still
    connected.
    """
    context.num_given_up_bytes += transport.get_write_buffer_size()
    opened = transport.get_extra_info("socket")
    if opened is not None:
        with suppress(OSError):  # lost already
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
    transport.abort()


# A request without a valid key costs the server a connection, a look at its head, and the bytes of its body that the
# client sends before it reads the answer. A client that comes back at once could repeat this hundreds of times a
# second, so it waits for its next refusal and gets a bounded share of the loop. Only refused requests wait: a valid key
# from the same address is not delayed.

# Refusals of a client that are answered at once, and how many more each second.
_BURST: Final = 50
_PER_S: Final = 50
# Bytes of refused bodies that count as much as one refusal.
_BYTES_PER_REFUSAL: Final = 1 << 20
# The longest wait. It also bounds for how long a client is remembered.
_MAX_WAIT_S: Final = 5.0
_MAX_CLIENTS: Final = 4096


class RefusedPeers:
    """Counts refusals by client. Event loop thread only."""

    __slots__ = ("_clock", "_paid_until_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # For each client, when it will have waited for all of its refusals so far.
        self._paid_until_s: dict[str, float] = {}

    def wait_s(self, client: str) -> float:
        """A request of `client` is refused by its head: how long its answer must wait, in seconds."""
        now_s = self._clock()
        return max(0.0, self._charge(client, 1.0, now_s) - now_s - _BURST / _PER_S)

    def dropped(self, client: str, num_bytes: int) -> None:
        """A refused client has sent that much of a body, which was read and dropped."""
        if num_bytes >= _BYTES_PER_REFUSAL:
            self._charge(client, num_bytes / _BYTES_PER_REFUSAL, self._clock())

    def _charge(self, client: str, cost: float, now_s: float) -> float:
        known = self._paid_until_s
        before_s = max(now_s, known.pop(client, now_s))
        if len(known) >= _MAX_CLIENTS:
            self._forget(now_s)
        until_s = min(before_s + cost / _PER_S, now_s + _BURST / _PER_S + _MAX_WAIT_S)
        known[client] = until_s
        return until_s

    def _forget(self, now_s: float) -> None:
        """Forget the clients that have waited, and at least the one that was refused the longest ago."""
        known = self._paid_until_s
        del known[next(iter(known))]
        for client in [client for client, until_s in known.items() if until_s <= now_s]:
            del known[client]
