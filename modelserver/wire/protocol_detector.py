"""The beginning of a connection, until it is known which protocol it speaks.

With TLS the handshake told it (ALPN), else the first bytes do: an HTTP/2 client sends its preface first,
and in HTTP/1.1 too it is the client that speaks first (RFC 9113, 3.3 and 3.4).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from modelserver.telemetry.wire_counts import Protocol, Violation
from modelserver.telemetry.wire_counts import Protocol as Spoken
from modelserver.wire.context import FIRST_WORDS_S, WireContext

if TYPE_CHECKING:
    from modelserver.wire.http1.connection import Http1Connection
    from modelserver.wire.http2.connection import Http2Connection

_logger = logging.getLogger(__name__)

# A peer that repeats the same mistake must not fill the log.
_SILENCE_S = 60.0


# `begin` of a connection is called once, in place of `connection_made`, with the bytes already read.
MakeConnection = Callable[[WireContext], "Http1Connection | Http2Connection"]


class Entrance:
    """Made once per port. `http1` and `http2` make the connection that takes over when it is known what the
    client speaks; `name` is the port's in the log.
    """

    def __init__(self, context: WireContext, name: str, *, http1: MakeConnection, http2: MakeConnection) -> None:
        self.context = context
        self.http1 = http1
        self.http2 = http2
        self._name = name
        self._silent_until_s: dict[Violation, float] = {}

    def complain(self, violation: Violation, text: str) -> None:
        """Count a peer's violation before its protocol was known; log it unless a similar one was just logged."""
        self.context.counts.violated(Spoken.UNKNOWN, violation)
        now_s = self.context.loop.time()
        if now_s >= self._silent_until_s.get(violation, 0.0):
            self._silent_until_s[violation] = now_s + _SILENCE_S
            _logger.warning("%s: %s (logged at most once in %g s)", self._name, text, _SILENCE_S)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_METHOD_OF_PREFACE = PREFACE[:4]
_TLS_HANDSHAKE = 0x16  # the first byte of a record that begins a handshake (RFC 8446, 5.1)


class ProtocolDetector(asyncio.BufferedProtocol):
    """A connection whose protocol is not known yet; then another protocol takes its transport over.

    Everything is called on the event loop thread.
    """

    __slots__ = (
        "_context",
        "_data",
        "_entrance",
        "_is_open",
        "_since_s",
        "_transport",
    )

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance
        self._context = entrance.context
        self._transport: asyncio.Transport
        self._since_s = 0.0
        self._data = b""
        self._is_open = False

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._is_open = True
        self._since_s = self._context.loop.time()
        self._context.connections.add(self)
        self._context.counts.opened(Protocol.UNKNOWN)
        if self._context.is_draining:
            self.shutdown()
        make = self._agreed()
        if make is not None:
            self._hand_over(make)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the arena has one size
        return self._context.arena.view

    def buffer_updated(self, nbytes: int) -> None:
        self._data += self._context.arena.view[:nbytes].tobytes()
        head = self._data[: len(PREFACE)]
        if head == PREFACE:
            self._hand_over(self._entrance.http2)
        elif PREFACE.startswith(head):
            return  # more will tell
        elif head.startswith(_METHOD_OF_PREFACE):
            self._close(Violation.BAD_PREFACE, "a client began HTTP/2 and went on with something else")
        elif head[0] == _TLS_HANDSHAKE:
            self._close(
                Violation.TLS,
                "a client tries TLS on a port without it; give the server a certificate with --tls-cert "
                "and --tls-key, or have the client use http://",
            )
        else:
            self._hand_over(self._entrance.http1)

    def connection_lost(self, _error: Exception | None) -> None:
        self._leave()

    # Called by the port.

    def sweep(self, now_s: float) -> None:
        """Close a connection that sends no request."""
        limit_s = self._context.limits.times.head_s
        if now_s - self._since_s > limit_s:
            self._close(Violation.SLOW_HEAD, f"a client said nothing complete within {limit_s:g} s")

    def retire(self) -> None:
        """No request was sent yet."""

    def shutdown(self) -> None:
        """Close unless a request arrives soon: the first one may be on its way."""
        self._context.loop.call_later(FIRST_WORDS_S, self._close_if_silent)

    def dismiss(self) -> None:
        self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()

    def _close_if_silent(self) -> None:
        if self._is_open:
            self._transport.abort()

    def _agreed(self) -> MakeConnection | None:
        """The protocol that a handshake agreed on."""
        secured = self._transport.get_extra_info("ssl_object")
        agreed = secured.selected_alpn_protocol() if secured is not None else None
        if agreed is None:
            return None
        return self._entrance.http2 if agreed == "h2" else self._entrance.http1

    def _hand_over(self, make: MakeConnection) -> None:
        self._leave()
        connection = make(self._context)
        self._transport.set_protocol(cast(asyncio.BufferedProtocol, connection))
        connection.begin(self._transport, self._data)

    def _close(self, violation: Violation, text: str) -> None:
        self._entrance.complain(violation, text)
        self._leave()
        self._transport.abort()

    def _leave(self) -> None:
        """The detection is over: the protocol is known, or the connection is gone."""
        if self._is_open:
            self._is_open = False
            self._context.connections.discard(self)
            self._context.counts.closed(Protocol.UNKNOWN)
