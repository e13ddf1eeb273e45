"""Tells a client that the port has no room for it, if its protocol can say so."""

from __future__ import annotations

import asyncio
import json

from modelserver.wire.context import WireContext


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
