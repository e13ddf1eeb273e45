"""A port without its listener: takes accepted sockets, and keeps their connections from the handshake to the drain.

A client that finds no room gets an answer that says so, if its protocol has one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket

from modelserver.core.interpreter import give_back
from modelserver.core.large_buffers import LARGE_BUFFERS
from modelserver.core.long_work import long_work
from modelserver.protocol.call import GrpcHandler
from modelserver.protocol.exchange import HttpExchange, HttpHandler
from modelserver.protocol.response import message_response
from modelserver.telemetry.wire_counts import Violation, WireCounts
from modelserver.wire.context import Connection, Outbox, WireContext
from modelserver.wire.limits import WireLimits
from modelserver.wire.protocol_detector import Entrance, MakeConnection, ProtocolDetector
from modelserver.wire.sockets.poller import Poller
from modelserver.wire.sockets.tls_transport import TlsTerms, TlsTransport
from modelserver.wire.sockets.transport import SocketTransport
from modelserver.wire.tls import TlsFiles, TlsReloader


class Refusal(asyncio.BufferedProtocol):
    """One connection over the limit: waits for its first bytes, answers them, and closes.

    HTTP/2 is closed without a word: after SETTINGS and a GOAWAY with the reason a gRPC client counts the
    connection as one that succeeded and opens the next at once, hundreds a second; without, it backs off.
    """

    def __init__(self, context: WireContext, text: str) -> None:
        self._context = context
        self._transport: asyncio.Transport
        self._text = text
        self._since_s = context.loop.time()
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._context.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the arena has one size
        return self._context.arena.view

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_answered:
            return
        self._is_answered = True
        if self._context.arena.view[:nbytes].tobytes().startswith(b"PRI"):
            self._transport.abort()
            return
        self._transport.write(last_words("503 Service Unavailable", self._text, "Retry-After: 1\r\n"))
        # The peer closes; a close from here, with bytes of the request unread, could overtake the answer.
        self._transport.write_eof()

    def connection_lost(self, _error: Exception | None) -> None:
        self._context.connections.discard(self)

    def sweep(self, now_s: float) -> None:
        if now_s - self._since_s > self._context.limits.times.linger_s:
            self._transport.abort()

    def retire(self) -> None:
        """It has no next answer."""

    def shutdown(self) -> None:
        self._transport.abort()

    def dismiss(self) -> None:
        self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()


def last_words(status: str, text: str, headers: str = "") -> bytes:
    """An answer in HTTP/1.1 that is the connection's last. `headers` end in CRLF each."""
    body = json.dumps({"error": text}).encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{headers}Connection: close\r\n\r\n"
    )
    return head.encode() + body


_logger = logging.getLogger(__name__)

_SWEEP_S = 1.0
# Connections checked in one turn of the loop: thousands of idle ones must not delay the busy ones.
_SWEEP_SLICE = 500
# When abandoned answers add up to this size, their freed memory is returned to the system.
_MUCH_GIVEN_UP_BYTES = 16 << 20
# The heap keeps the memory of long requests for the next ones, until there were none for this long.
_REST_S = 5.0
# The share of the process's descriptors for connections: the rest is for models, files and child processes.
_DESCRIPTOR_SHARE = 0.9
# Connections beyond the limit that get an answer; further ones are cut without one.
_MAX_REFUSALS = 64
_DRAIN_POLL_S = 0.01
_ABORT_WAIT_S = 1.0
# Time for handshakes in progress when the port stops.
_HANDSHAKE_GRACE_S = 2.0
# Time to tell clients that their requests were given up.
_LAST_WORDS_S = 1.0


class Port:
    """Made, started and stopped on the running event loop. `name` is the port's in the log.

    `http` or `grpc` is None where the port does not serve that protocol; `http1` and `http2` make the
    connections that speak them.
    """

    def __init__(
        self,
        name: str,
        *,
        http: HttpHandler | None,
        grpc: GrpcHandler | None,
        limits: WireLimits,
        counts: WireCounts,
        http1: MakeConnection,
        http2: MakeConnection,
        tls: TlsFiles | None = None,
    ) -> None:
        """Raises InvalidArgumentError when a file of `tls` is invalid."""
        loop = asyncio.get_running_loop()
        self.name = name
        self.context = WireContext(loop, http, grpc, limits, counts, Outbox(loop))
        self._entrance = Entrance(self.context, name, http1=http1, http2=http2)
        self._tls = TlsReloader(tls, counts.reloads) if tls is not None else None
        self._poller = Poller(loop)
        self._tls_terms = TlsTerms(
            handshake_s=limits.times.head_s,
            linger_s=limits.times.linger_s,
            open_answer=last_words("400 Bad Request", "this port speaks TLS; ask https:// instead"),
        )
        # Connections in their handshake.
        self._shaking: set[TlsTransport] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look after connections."""
        self._sweeper = self.context.loop.call_later(_SWEEP_S, self._sweep)

    def take(self, accepted: socket.socket) -> None:
        """Serve a connection: an accepted socket, which becomes the port's and does not block."""
        objection = self._objection(accepted.fileno())
        if objection is None:
            self._begin(accepted)
            return
        self._entrance.complain(Violation.TOO_MANY_CONNECTIONS, f"refused a connection: {objection}")
        num_refusals = self.num_connections - self.context.limits.max_connections
        if self._tls is not None or num_refusals >= _MAX_REFUSALS:
            accepted.close()  # no answer is possible before the handshake
        else:
            self._begin(accepted, objection)

    def retire(self) -> None:
        """Serve requests, and let answers tell clients, where the protocol can, to send the next ones elsewhere."""
        self.context.is_retiring = True
        for connection in list(self.context.connections):
            connection.retire()

    async def stop(self, grace_s: float) -> None:
        """Give requests in flight `grace_s` seconds to finish, then fail the rest.

        No more sockets are passed in.
        """
        context = self.context
        context.is_draining = True
        if context.grpc is not None:
            context.grpc.drain()
        for connection in list(context.connections):
            connection.shutdown()
        cutting = context.loop.call_later(min(grace_s, _HANDSHAKE_GRACE_S), self._cut_handshakes)
        try:
            await self._until_empty(grace_s)
        finally:
            cutting.cancel()
            self._cut_handshakes()
        await asyncio.sleep(0)  # clients of abandoned requests get an answer
        if context.connections:
            _logger.warning("%s: gave %d connections up at the end of the grace", self.name, len(context.connections))
            for connection in list(context.connections):
                connection.dismiss()
            await self._until_empty(_LAST_WORDS_S)
        for connection in list(context.connections):
            connection.abort()
        await self._until_empty(_ABORT_WAIT_S)
        self._poller.close()
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _until_empty(self, timeout_s: float) -> None:
        loop = self.context.loop
        deadline_s = loop.time() + timeout_s
        while (self.context.connections or self._shaking) and loop.time() < deadline_s:  # noqa: ASYNC110 - no event marks this moment
            await asyncio.sleep(_DRAIN_POLL_S)

    # Connections to come.

    @property
    def num_connections(self) -> int:
        """Open connections, and those in their handshake."""
        return len(self.context.connections) + len(self._shaking)

    def _objection(self, descriptor: int) -> str | None:
        """The reason to refuse a connection with this descriptor; None if there is room for it."""
        limit = self.context.limits.max_connections
        if self.num_connections >= limit:
            return f"the port has its {limit} connections; raise the limit with --max-connections"
        # The system gives the lowest free number, so it tells how many are taken.
        num_descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptor >= num_descriptors * _DESCRIPTOR_SHARE:
            return f"nearly all of the server's {num_descriptors} file descriptors are open; raise them with ulimit -n"
        return None

    def _begin(self, accepted: socket.socket, objection: str | None = None) -> None:
        loop = self.context.loop
        below = SocketTransport(loop, self._poller, accepted)
        if objection is not None:
            below.begin(Refusal(self.context, objection))
        elif self._tls is None:
            below.begin(ProtocolDetector(self._entrance))
        else:
            transport = TlsTransport(loop, self._tls.context, self._tls_terms, self._end_handshake)
            self._shaking.add(transport)
            transport.begin(below, ProtocolDetector(self._entrance))

    def _end_handshake(self, transport: TlsTransport, error: Exception | None) -> None:
        self._shaking.remove(transport)
        # A reset comes from a client that gave up, or from a probe of the port.
        if error is not None and not isinstance(error, ConnectionResetError):
            self._entrance.complain(Violation.TLS, f"a TLS handshake failed: {error}")

    def _cut_handshakes(self) -> None:
        for transport in list(self._shaking):
            transport.abort()

    # Connections that are there.

    def _sweep(self) -> None:
        """One timer for all time limits: a timer per request would cost more than parsing the request."""
        self._sweeper = self.context.loop.call_later(_SWEEP_S, self._sweep)
        if self._tls is not None:
            self._tls.look()
        has_much = self.context.num_given_up_bytes >= _MUCH_GIVEN_UP_BYTES
        if long_work().has_rested(_REST_S) or has_much:
            self.context.num_given_up_bytes = 0
            self.context.loop.run_in_executor(None, give_back, _MUCH_GIVEN_UP_BYTES)
        if LARGE_BUFFERS.is_due():
            self.context.loop.run_in_executor(None, LARGE_BUFFERS.sweep)
        self._sweep_slice(list(self.context.connections))

    def _sweep_slice(self, connections: list[Connection]) -> None:
        now_s = self.context.loop.time()
        for connection in connections[:_SWEEP_SLICE]:
            try:
                connection.sweep(now_s)
            except Exception:
                # The other connections are still checked.
                _logger.exception("%s: checking a connection failed, closing it", self.name)
                connection.abort()
        if rest := connections[_SWEEP_SLICE:]:
            self.context.loop.call_soon(self._sweep_slice, rest)


class NoHttp(HttpHandler):
    """Tells HTTP clients which port to use."""

    def handle(self, exchange: HttpExchange) -> None:
        """Answer 404."""
        exchange.respond(message_response(404, "this port serves gRPC and no HTTP: see --http-port and --shared-ports"))
