"""A client that says something to a connection and leaves, and what must hold of the connection then.

Handlers answer whatever is asked; nothing of it needs a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from support.memory_transport import exchange, exchange_from_start
from support.replaying import ReplayHttp, replay_context

from modelserver.wire.context import WireContext
from modelserver.wire.http1.connection import Http1Connection
from modelserver.wire.http2.connection import Http2Connection
from modelserver.wire.limits import WireLimits
from modelserver.wire.protocol_detector import Entrance, ProtocolDetector


def converse(
    kind: Callable[[WireContext], Any],
    pieces: Iterable[bytes],
    *,
    http: ReplayHttp | None = None,
    limits: WireLimits | None = None,
) -> bytes:
    """What a connection of `kind` answers to a client that says `pieces`, the first of them at once, and leaves.

    Raises AssertionError if a callback failed, or if something of the connection is left.
    """

    async def run() -> bytes:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
        context = replay_context(limits, http)
        transport = await exchange(kind(context), pieces, begins_with=1)
        _check_nothing_left(context, failures)
        return bytes(transport.written)

    return asyncio.run(run())


def converse_from_start(pieces: Iterable[bytes]) -> bytes:
    """As `converse`, with a connection that is yet to find out what the client speaks."""

    async def run() -> bytes:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
        context = replay_context()
        entrance = Entrance(context, "memory", http1=Http1Connection, http2=Http2Connection)
        transport = await exchange_from_start(ProtocolDetector(entrance), pieces)
        _check_nothing_left(context, failures)
        return bytes(transport.written)

    return asyncio.run(run())


def _check_nothing_left(context: WireContext, failures: list[dict[str, Any]]) -> None:
    assert not failures, failures
    assert not context.connections, "a lost connection is still there"
    assert not any(context.counts.connections_open.values()), "a lost connection is still counted"
    assert context.counts.open_streams == 0, "streams of a lost connection are still counted"
    assert context.assembly.num_bytes == 0, "memory of requests is still charged"
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, f"tasks are left: {left}"
