"""A connection of the wire without sockets: a test hands it bytes piece by piece and sees what it writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Protocol

from modelserver.core.tensor import Buffer

# Turns of the loop after which a connection that has nothing to do has done it.
_MAX_TURNS = 1000
_QUIET_TURNS = 4


class MemoryConnection(Protocol):
    """What `Http1Connection` and `Http2Connection` have beyond an `asyncio.BufferedProtocol`."""

    def begin(self, transport: asyncio.Transport, data: bytes) -> None: ...


class MemoryTransport(asyncio.Transport):
    """Keeps what is written. Its peer takes everything at once, so that writing never pauses.

    As a real one, it calls nothing from within `write`, `close` and `abort`.
    """

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 50000), "sockname": ("192.0.2.2", 8000)})
        self.written = bytearray()
        self.is_paused = False
        self.is_lost = False
        self._is_closing = False
        self._protocol: asyncio.BaseProtocol | None = None

    def write(self, data: Buffer) -> None:
        assert not self.is_lost, "the connection writes after it was lost"
        if not self._is_closing:
            self.written += data

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        for data in list_of_data:
            self.write(data)

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_reading(self) -> bool:
        return not self.is_paused

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is None or low is None or low <= high, "limits are the wrong way round"

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._is_closing = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol


async def exchange(connection: MemoryConnection, pieces: Iterable[bytes], *, begins_with: int = 0) -> MemoryTransport:
    """Feed the client's bytes as these pieces, then its end; returns when nothing more happens.

    The first `begins_with` pieces are joined and come with `begin`, as what the port has read already.
    """
    transport = MemoryTransport()
    transport.set_protocol(connection)
    pieces = list(pieces)
    connection.begin(transport, b"".join(pieces[:begins_with]))
    await _go_on(transport, pieces[begins_with:])
    return transport


async def exchange_from_start(protocol: asyncio.Protocol, pieces: Iterable[bytes]) -> MemoryTransport:
    """As `exchange`, for a protocol that may hand the transport over to another one."""
    transport = MemoryTransport()
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    await _go_on(transport, pieces)
    return transport


async def _go_on(transport: MemoryTransport, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        await _until_reading(transport)
        if transport.is_closing():
            break
        protocol = transport.get_protocol()
        if isinstance(protocol, asyncio.BufferedProtocol):
            receive(protocol, piece)
        else:
            protocol.data_received(piece)
        await asyncio.sleep(0)
    await settle(transport)
    transport.is_lost = True
    transport.get_protocol().connection_lost(None)
    await asyncio.sleep(0)


def receive(connection: asyncio.BufferedProtocol, data: bytes) -> None:
    """What a transport does with `data` that a socket has: into the connection's buffer, as often as it takes."""
    rest = memoryview(data)
    while rest:
        with memoryview(connection.get_buffer(-1)) as buffer:
            num_bytes = min(len(buffer), len(rest))
            assert num_bytes, "a connection's buffer is never empty"
            buffer[:num_bytes] = rest[:num_bytes]
        connection.buffer_updated(num_bytes)
        rest = rest[num_bytes:]


async def settle(transport: MemoryTransport) -> None:
    """Give the connection's callbacks and tasks their turns until it writes nothing more."""
    quiet = 0
    for _ in range(_MAX_TURNS):
        num_bytes = len(transport.written)
        await asyncio.sleep(0)
        quiet = quiet + 1 if len(transport.written) == num_bytes else 0
        if quiet >= _QUIET_TURNS:
            return
    raise AssertionError(f"the connection still writes after {_MAX_TURNS} turns of the loop")


async def _until_reading(transport: MemoryTransport) -> None:
    for _ in range(_MAX_TURNS):
        if not transport.is_paused or transport.is_closing():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"the connection reads no further, after {_MAX_TURNS} turns of the loop")
