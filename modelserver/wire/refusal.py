"""Tells a client that the port has no room for it, in the protocol that the client speaks."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import cast

from modelserver.wire.context import WireContext

_SETTINGS_FRAME = struct.pack(">HBBBI", 0, 0, 4, 0, 0)
_GOAWAY = 7
_ENHANCE_YOUR_CALM = 11


class Refusal(asyncio.Protocol):
    """One connection over the limit: waits for its first bytes, answers them, and closes."""

    def __init__(self, context: WireContext, text: str) -> None:
        self._context = context
        self._transport: asyncio.Transport
        self._text = text
        self._since_s = context.loop.time()
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports write like asyncio.Transport without inheriting from it.
        self._transport = cast(asyncio.Transport, transport)
        self._context.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._is_answered:
            return
        self._is_answered = True
        self._transport.write(_goaway(self._text) if data.startswith(b"PRI") else _unavailable(self._text))
        # The peer closes; a close from here, with bytes of the request unread, could overtake the answer.
        self._transport.write_eof()

    def connection_lost(self, _error: Exception | None) -> None:
        self._context.connections.discard(self)

    def sweep(self, now_s: float) -> None:
        if now_s - self._since_s > self._context.limits.times.linger_s:
            self._transport.abort()

    def shutdown(self) -> None:
        self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()


def _goaway(text: str) -> bytes:
    """An empty SETTINGS, which must come first, and a GOAWAY before any stream (RFC 9113, 3.4 and 6.8)."""
    payload = struct.pack(">II", 0, _ENHANCE_YOUR_CALM) + text.encode()
    return _SETTINGS_FRAME + struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 0xFF, _GOAWAY, 0, 0) + payload


def _unavailable(text: str) -> bytes:
    body = json.dumps({"error": text}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
